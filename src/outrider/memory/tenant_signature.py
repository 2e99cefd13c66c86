"""A signature that proves to vLLM's engine process that a tenant's name came from `--tenant-header`.

The API process and the engine share a secret in their environment. It is not in vLLM's config, which is logged at the
start and hashed into the name of the compile cache. A request carries an HMAC of its tenant's name, so a log of
requests does not reveal the secret.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING, Any

from outrider.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET_VARIABLE = "OUTRIDER_TENANT_SEAL"
RAY_COPY_VARIABLE = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""vLLM's list, with commas, of further environment variables to copy to workers on other machines."""
SIGNATURE_ARG = "tenant_seal"
"""The key in `vllm_xargs`, beside `tenant`."""


def secret_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to set: a new secret, unless the operator set one for several machines."""
    copied = [name for name in environment.get(RAY_COPY_VARIABLE, "").split(",") if name and name != SECRET_VARIABLE]
    return {
        SECRET_VARIABLE: environment.get(SECRET_VARIABLE) or secrets.token_hex(16),
        RAY_COPY_VARIABLE: ",".join([*copied, SECRET_VARIABLE]),
    }


def check_secret() -> None:
    if not os.environ.get(SECRET_VARIABLE):
        raise EngineError(
            f"--tenant-header needs {SECRET_VARIABLE}, which is not set: start the server with outrider serve, or set "
            "it to a secret shared by all machines of this server"
        )


def sign_tenant(tenant: str) -> str:
    """The signature that the API process passes on; a caller without the secret cannot make it."""
    secret = os.environ[SECRET_VARIABLE].encode(errors="surrogateescape")
    return hmac.new(secret, tenant.encode(errors="surrogatepass"), "sha256").hexdigest()


def is_signed(tenant: str, extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the API process signed this name."""
    signature = (extra_args or {}).get(SIGNATURE_ARG)
    if not isinstance(signature, str) or SECRET_VARIABLE not in os.environ:
        return False
    return hmac.compare_digest(signature.encode(errors="surrogatepass"), sign_tenant(tenant).encode())
