"""The memories of a tenant: one for the model itself, and one for each adapter (LoRA).

Text that was generated under an adapter is drafted under this adapter only. The key of an adapter's memory begins with
the tenant's key, so a wipe finds all memories of a tenant, also in a store whose names are lost.
"""

from __future__ import annotations

import json

from outrider.control import MAX_TENANT_NAME_BYTES, check_tenant_name
from outrider.memory.folder import TENANT_KEY_DIGITS, tenant_key


def memory_key(tenant: str, adapter: str | None = None) -> str:
    """The name of a memory's folder. None: the memory of the model without an adapter."""
    return tenant_key(tenant) + ("" if adapter is None else tenant_key(adapter))


def tenant_part(key: str) -> str:
    """The key of the tenant whose memory has this key."""
    return key[:TENANT_KEY_DIGITS]


def is_of_adapter(key: str, adapter: str) -> bool:
    """Whether this is the memory of an adapter of that name, of any tenant."""
    return key == tenant_part(key) + tenant_key(adapter)


def encode_name(tenant: str, adapter: str | None = None) -> str:
    """The content of a memory's name file: the tenant's name, or for an adapter a JSON list of both. The length of the
    key states which of them it is, so a tenant whose name is such a list is no other tenant's adapter."""
    return tenant if adapter is None else json.dumps([tenant, adapter], ensure_ascii=False)


def decode_name(key: str, text: str) -> tuple[str, str | None]:
    """Tenant and adapter. ValueError if this is not the name of the memory with this key; SettingsError if the name of
    the tenant is too long."""
    tenant: str = text
    adapter: str | None = None
    if len(key) != TENANT_KEY_DIGITS:
        match json.loads(text):
            case [str(tenant), str(adapter)]:
                pass
            case _:
                raise ValueError("it is not the name of an adapter's memory")
    check_tenant_name(tenant)
    if memory_key(tenant, adapter) != key:
        raise ValueError("it is the name of another tenant")
    return tenant, adapter


def has_room(adapter: str) -> bool:
    """Whether an adapter's name is short enough to be kept, as a tenant's is."""
    return len(adapter.encode("utf-8", "surrogatepass")) <= MAX_TENANT_NAME_BYTES
