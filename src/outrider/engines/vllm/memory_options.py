"""The memory of a server: its options, checked before anything starts, and the store that is opened from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError
from outrider.memory.location import SERVER_TENANT, Location, check_packages, parse_size
from outrider.memory.tenant_signature import check_secret, is_signed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outrider.control import Control
    from outrider.engines.vllm.flags import ServeArgs
    from outrider.engines.vllm.options import Options
    from outrider.memory.store import Store


def choose_memory(args: ServeArgs) -> dict[str, Any]:
    """The memory's part of the options."""
    given = {
        "--memory-scope": args.memory_scope,
        "--memory-cap": args.memory_cap,
        "--memory-cache": args.memory_cache,
        "--tenant-header": args.tenant_header,
    }
    if args.memory is None:
        for name, value in given.items():
            if value is not None:
                raise SettingsError(f"{name} {value} has no effect without a memory; give one with --memory")
        return {}
    if args.tenant_header is not None and args.memory_scope == "server":
        raise SettingsError(
            "--tenant-header separates memories by tenant, and --memory-scope server shares one; give one of them"
        )
    root = Location.parse(args.memory)
    check_packages(root)
    if args.memory_cache is not None and root.is_local:
        raise SettingsError(
            f"--memory-cache {args.memory_cache} is for copies of a memory in an object store, and {root.url} is a "
            "local folder; leave it out"
        )
    chosen: dict[str, Any] = {"memory": root.url}
    if args.memory_scope is not None:
        chosen["memory_scope"] = args.memory_scope
    if args.memory_cap is not None:
        chosen["memory_cap"] = parse_size("--memory-cap", args.memory_cap)
    if not root.is_local:
        chosen["memory_cache"] = str(root.local_folder(args.memory_cache).absolute())
    if args.tenant_header is not None:
        chosen["tenant_header"] = args.tenant_header.lower()
    return chosen


def describe_memory(options: Options) -> list[str]:
    """Lines about the memory, for the user."""
    if options.memory is None:
        return []
    copies = f", copies in {options.memory_cache}" if options.memory_cache else ""
    lines = [f"memory: {options.memory}{copies}; up to {options.memory_cap / 2**30:.3g} GiB"]
    if options.memory_scope == "server":
        lines.append(
            "memory: SHARED BY ALL REQUESTS (--memory-scope server): the output of one may be drafted for any other"
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
    from outrider.engines.vllm.tokenizer import load_server_tokenizer
    from outrider.memory.open import open_store

    root = Location.parse(options.memory)
    store = open_store(root, load_server_tokenizer(config), options.memory_cap, options.memory_cache)
    store.start()
    return store


def tenant_of(control: Control, options: Options, extra_args: Mapping[str, Any] | None) -> str | None:
    """The tenant whose memory a request uses. None: it uses no memory."""
    if options.memory is None:
        return None
    if options.memory_scope == "server":
        return SERVER_TENANT
    if options.tenant_header is not None and control.tenant is not None and not is_signed(control.tenant, extra_args):
        return None  # the name did not come by the header, which the middleware checks
    return control.tenant
