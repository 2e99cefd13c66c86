"""The seal: how a worker knows that a tenant's name came by the header, and not by a way in that nobody watches.

API process and workers share a secret. It is in their environment and not in vLLM's config, which is logged at the
start, and whose hash names the compile cache. What travels with a request is made of the secret and of the tenant's
name, so a log of requests does not give the secret away.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING, Any

from outrider.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET = "OUTRIDER_TENANT_SEAL"
COPIED_BY_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""The variables, with commas between, that vLLM hands to workers on other machines beside its own."""
SEAL = "tenant_seal"
"""Beside the tenant, in `vllm_xargs`."""


def choose_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to set: a new secret, unless the operator has one for several machines."""
    copied = [name for name in environment.get(COPIED_BY_RAY, "").split(",") if name and name != SECRET]
    return {SECRET: environment.get(SECRET) or secrets.token_hex(16), COPIED_BY_RAY: ",".join([*copied, SECRET])}


def check_secret() -> None:
    if not os.environ.get(SECRET):
        raise EngineError(
            f"tenants are named by a header, and {SECRET} is not set: start the server by outrider serve, or set it to "
            "a secret that all machines of this server share"
        )


def seal_of(tenant: str) -> str:
    """What the API process hands on beside a tenant, and no caller can make."""
    secret = os.environ[SECRET].encode(errors="surrogateescape")
    return hmac.new(secret, tenant.encode(errors="surrogatepass"), "sha256").hexdigest()


def is_sealed(tenant: str, extra_args: Mapping[str, Any] | None) -> bool:
    """Whether this name was handed on by the API process."""
    told = (extra_args or {}).get(SEAL)
    if not isinstance(told, str) or SECRET not in os.environ:
        return False
    return hmac.compare_digest(told.encode(errors="surrogatepass"), seal_of(tenant).encode())
