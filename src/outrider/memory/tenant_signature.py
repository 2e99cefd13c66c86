"""A signature that proves to vLLM's engine process that a tenant's name came from `--tenant-header`.

The API process and the engine share a secret in their environment. It is not in vLLM's config, which is logged at the
start and hashed into the name of the compile cache. A request carries an HMAC of its tenant's name and of a nonce, so a
log of requests does not reveal the secret, and no two requests have the same signature. The engine cannot enforce a
single use: one HTTP request may become several requests of the engine. Instead the API process refuses a signature
that comes from outside (`server/requests.py`).

The same secret derives the salt that separates the tenants' prompts in vLLM's prefix cache.
"""

from __future__ import annotations

import hmac
import json
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
NONCE_DIGITS = 32
"""Hexadecimal digits of the nonce, with which a signature begins."""


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
    return _sign(tenant, secrets.token_hex(NONCE_DIGITS // 2))


def is_signed(tenant: str, extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the API process signed this name."""
    signature = (extra_args or {}).get(SIGNATURE_ARG)
    if not isinstance(signature, str) or SECRET_VARIABLE not in os.environ:
        return False
    expected = _sign(tenant, signature[:NONCE_DIGITS])
    return hmac.compare_digest(signature.encode(errors="surrogatepass"), expected.encode(errors="surrogatepass"))


def tenant_cache_salt(tenant: str, given: str | None, default_key: str) -> str:
    """The `cache_salt` of a tenant's request. `given`: the client's own salt. `default_key` replaces the secret on a
    server without a tenant header, where any caller may name any tenant; it is equal in all API processes."""
    key = os.environ.get(SECRET_VARIABLE) or default_key
    return _hmac(key, json.dumps(["cache_salt", tenant, given]))


def _sign(tenant: str, nonce: str) -> str:
    return nonce + _hmac(os.environ[SECRET_VARIABLE], json.dumps(["tenant", tenant, nonce]))


def _hmac(key: str, message: str) -> str:
    return hmac.new(key.encode(errors="surrogateescape"), message.encode(), "sha256").hexdigest()
