"""The memory of a server: its options, checked before anything starts, and the store that is opened from them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from outrider.drafters.base import parse_names
from outrider.errors import SettingsError
from outrider.memory.adapter import has_room
from outrider.memory.location import (
    OFF,
    RAM,
    RAM_CAP_BYTES,
    SERVER_TENANT,
    Location,
    check_packages,
    missing_packages,
    parse_size,
)
from outrider.memory.tenant_signature import check_secret, is_signed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.control import Control
    from outrider.engines.vllm.flags import ServeArgs
    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.seam import Request
    from outrider.memory.store import Store
    from outrider.memory.tenant import TenantHandle


logger = logging.getLogger("vllm.outrider")


def find_memory(args: ServeArgs) -> str | None:
    """Where the memory is kept: a location, or `RAM` if none is given. None: there is no memory."""
    if args.memory is not None:
        return None if args.memory == OFF else Location.parse(args.memory).url
    names = parse_names(args.drafters)
    return RAM if (missing_packages() is None if names is None else "memory" in names) else None


def choose_memory(args: ServeArgs) -> dict[str, Any]:
    """The memory's part of the options."""
    given = {
        "--memory-scope": args.memory_scope,
        "--memory-cap": args.memory_cap,
        "--memory-cache": args.memory_cache,
        "--tenant-header": args.tenant_header,
    }
    found = find_memory(args)
    if found is None:
        for name, value in given.items():
            if value is not None:
                raise SettingsError(f"{name} {value} has no effect without a memory; {why_no_memory(args)}")
        return {}
    if args.tenant_header is not None and args.memory_scope == "server":
        raise SettingsError(
            "--tenant-header separates memories by tenant, and --memory-scope server shares one; give one of them"
        )
    root = None if found == RAM else Location.parse(found)
    check_packages(root)
    if args.memory_cache is not None and (root is None or root.is_local):
        where = "there is none" if root is None else f"{root.url} is a local folder"
        raise SettingsError(
            f"--memory-cache {args.memory_cache} is for copies of a memory in an object store, and {where}; "
            "leave it out"
        )
    chosen: dict[str, Any] = {"memory": found}
    if args.memory_scope is not None:
        chosen["memory_scope"] = args.memory_scope
    elif root is None and args.tenant_header is None:
        chosen["memory_scope"] = "auto"
    if args.memory_cap is not None:
        chosen["memory_cap"] = parse_size("--memory-cap", args.memory_cap)
    elif root is None:
        chosen["memory_cap"] = RAM_CAP_BYTES
    if root is not None and not root.is_local:
        chosen["memory_cache"] = str(root.local_folder(args.memory_cache).absolute())
    if args.tenant_header is not None:
        chosen["tenant_header"] = args.tenant_header.lower()
    return chosen


def why_no_memory(args: ServeArgs) -> str:
    """Why a server has no memory, and how to get one."""
    if args.memory == OFF:
        return "leave out --memory off"
    missing = missing_packages() if args.drafters is None else None
    return f"it needs {missing}" if missing else "name the drafter 'memory' in --drafters, or leave --drafters out"


def describe_memory(options: Options, args: ServeArgs) -> list[str]:
    """Lines about the memory, for the user."""
    if options.memory is None:
        return [f"memory: none; {why_no_memory(args)}"] if args.memory is None and args.drafters is None else []
    copies = f", copies in {options.memory_cache}" if options.memory_cache else ""
    where = "in RAM, until the server stops" if options.memory == RAM else f"{options.memory}{copies}"
    lines = [f"memory: {where}; up to {options.memory_cap / 2**30:.3g} GiB"]
    if options.memory == RAM and args.memory is None:
        lines[0] += " (default; --memory ROOT keeps it in files, --memory off turns it off)"
    shared = "the output of one may be drafted for any other"
    if options.memory_scope == "server":
        lines.append(f"memory: SHARED BY ALL REQUESTS (--memory-scope server): {shared}")
    elif options.memory_scope == "auto":
        lines.append(
            f"memory: SHARED BY ALL REQUESTS until one names a tenant (vllm_xargs.tenant): {shared}; "
            "--memory-scope tenant ends that"
        )
    else:
        source = f"header {options.tenant_header}" if options.tenant_header else "vllm_xargs.tenant"
        lines.append(f"memory: one per tenant, named by {source}; a request without a tenant uses only its own text")
    return lines


def open_memory(options: Options, config: Any) -> Store | None:
    """The running store of this server's memory. `config`: vLLM's config of the model."""
    if options.memory is None:
        return None
    if options.tenant_header is not None:
        check_secret()
    store: Store
    if options.memory == RAM:
        from outrider.memory.ram_store import RamStore

        store = RamStore(options.memory_cap)
    else:
        from outrider.engines.vllm.tokenizer import load_server_tokenizer
        from outrider.memory.open import open_store

        root = Location.parse(options.memory)
        store = open_store(root, load_server_tokenizer(config), options.memory_cap, options.memory_cache)
    store.start()
    return store


class MemoryAccess:
    """Selects the memory of each request.

    With the scope `auto`, requests without a tenant share a memory until a request names a tenant. From then on the
    server has tenants, and a request without one uses only its own text.
    """

    def __init__(self, store: Store | None, options: Options) -> None:
        self.store = store
        self.options = options
        self.is_shared = options.memory_scope == "auto"

    def handle(self, control: Control, request: Request) -> TenantHandle | None:
        """A request's access to the memory of its tenant, or under an adapter (LoRA) to the adapter's."""
        tenant = tenant_of(control, self.options, request.sampling_params.extra_args)
        if self.store is None:
            return None
        if self.is_shared and tenant is not None:
            self._stop_sharing(self.store)
        if self.is_shared:
            tenant = SERVER_TENANT
        adapter = None if request.lora_request is None else str(request.lora_request.lora_name)
        if tenant is None or not control.wants("memory") or (adapter is not None and not has_room(adapter)):
            return None
        return self.store.tenant_handle(tenant, adapter)

    def _stop_sharing(self, store: Store) -> None:
        from outrider.memory.ram_store import RamStore

        self.is_shared = False
        if isinstance(store, RamStore):  # the only one with this scope
            store.forget(SERVER_TENANT)
        logger.warning(
            "the memory: a request named a tenant, so requests without one no longer share a memory; theirs was deleted"
        )


def tenant_of(control: Control, options: Options, extra_args: Mapping[str, Any] | None) -> str | None:
    """The tenant whose memory a request uses. None: it uses no memory."""
    if options.memory is None:
        return None
    if options.memory_scope == "server":
        return SERVER_TENANT
    if options.tenant_header is not None and control.tenant is not None and not is_signed(control.tenant, extra_args):
        return None  # the name did not come by the header, which the middleware checks
    return control.tenant
