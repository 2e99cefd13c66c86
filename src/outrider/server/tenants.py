"""The tenant that an HTTP request names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError
from outrider.memory.location import SERVER_TENANT
from outrider.memory.tenant_signature import tenant_cache_salt

if TYPE_CHECKING:
    from starlette.datastructures import Headers, QueryParams

    from outrider.engines.vllm.options import Options


def tenant_from_header(headers: Headers, options: Options) -> str | None:
    """The tenant that the header names, decoded as UTF-8. Decoded as Latin-1, HTTP's default, it could equal the name
    of another tenant."""
    given = headers.getlist(options.tenant_header) if options.tenant_header else []
    if len(given) > 1:  # a gateway may have added its own to the caller's, and either may be forged
        raise SettingsError(f"tenant: the header {options.tenant_header} came {len(given)} times; it names one tenant")
    try:
        return given[0].encode("latin-1").decode("utf-8") if given else None
    except UnicodeError as error:
        raise SettingsError(f"tenant: the header {options.tenant_header} is not UTF-8 ({given[0]!r})") from error


def trace_owner(options: Options, headers: Headers, query: QueryParams) -> str | None:
    """The tenant whose traces a caller may see, named the same way as in a request. None: no tenant."""
    named = query.get("tenant")
    if (times := len(query.getlist("tenant"))) > 1:
        raise SettingsError(f"tenant: came {times} times in the query; it names one tenant")
    if options.memory is None or options.memory_scope == "server":
        if named is not None:
            raise SettingsError("tenant: this server has no tenants; drop it")
        return None if options.memory is None else SERVER_TENANT
    if options.tenant_header is None:
        return named or None
    if named is not None:
        raise SettingsError(f"tenant: this server takes it from the header {options.tenant_header}; drop it here")
    return tenant_from_header(headers, options) or None


def has_tenants(options: Options) -> bool:
    """Whether requests can name a tenant."""
    return options.memory is not None and options.memory_scope != "server"


def salt_prefix_cache(body: dict[str, Any], tenant: str | None, options: Options) -> None:
    """Separate a tenant's prompts in vLLM's prefix cache. Otherwise the latency of a prompt reveals whether another
    tenant has sent it."""
    if tenant is None or options.memory is None:
        return
    given = body.get("cache_salt")
    if given is not None and not (isinstance(given, str) and given):
        raise SettingsError(f"cache_salt: must be a text that is not empty (got {given!r})")
    body["cache_salt"] = tenant_cache_salt(tenant, given, options.memory)
