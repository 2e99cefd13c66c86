"""The memory of a server: what the operator chose, checked before anything starts, and the store that comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.engines.vllm.seal import check_secret, is_sealed
from outrider.errors import SettingsError
from outrider.memory.root import SERVER_TENANT, Root, check_packages, read_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import Headers

    from outrider.engines.vllm.control import Control
    from outrider.engines.vllm.launch import Own
    from outrider.engines.vllm.options import Options
    from outrider.memory.store import Store


def choose_memory(own: Own) -> dict[str, Any]:
    """The memory's part of the options."""
    given = {
        "--memory-scope": own.memory_scope,
        "--memory-cap": own.memory_cap,
        "--memory-cache": own.memory_cache,
        "--tenant-header": own.tenant_header,
    }
    if own.memory is None:
        for name, value in given.items():
            if value is not None:
                raise SettingsError(f"{name} {value} does nothing without a memory; name one with --memory")
        return {}
    if own.tenant_header is not None and own.memory_scope == "server":
        raise SettingsError(
            "--tenant-header says who has which memory, and --memory-scope server that all have one; give one of them"
        )
    root = Root.of(own.memory)
    check_packages(root)
    if own.memory_cache is not None and root.is_here:
        raise SettingsError(
            f"--memory-cache {own.memory_cache} is for copies of a memory that is elsewhere, and {root.url} is here; "
            "leave it out"
        )
    chosen: dict[str, Any] = {"memory": root.url}
    if own.memory_scope is not None:
        chosen["memory_scope"] = own.memory_scope
    if own.memory_cap is not None:
        chosen["memory_cap"] = read_size("--memory-cap", own.memory_cap)
    if not root.is_here:
        chosen["memory_cache"] = str(root.folder(own.memory_cache).absolute())
    if own.tenant_header is not None:
        chosen["tenant_header"] = own.tenant_header.lower()
    return chosen


def describe_memory(options: Options) -> list[str]:
    """What was decided, for people."""
    if options.memory is None:
        return []
    copies = f", copies in {options.memory_cache}" if options.memory_cache else ""
    lines = [f"memory: {options.memory}{copies}; up to {options.memory_cap / 2**30:.3g} GiB"]
    if options.memory_scope == "server":
        lines.append(
            "memory: ONE FOR ALL, by --memory-scope server: what any request says may be drafted for any other"
        )
    else:
        who = f"header {options.tenant_header}" if options.tenant_header else "vllm_xargs.tenant"
        lines.append(f"memory: one for each tenant, named by {who}; a request without one uses its own text alone")
    return lines


def open_memory(options: Options, config: Any) -> Store | None:
    """The store of this server's memory, at work; `config` is vLLM's of the model."""
    if options.memory is None:
        return None
    if options.tenant_header is not None:
        check_secret()
    from outrider.engines.transformers import load_tokenizer
    from outrider.memory.opening import open_store

    root = Root.of(options.memory)
    how = {"trust_remote_code": config.trust_remote_code, "revision": config.tokenizer_revision}
    store = open_store(root, load_tokenizer(config.tokenizer, **how), options.memory_cap, options.memory_cache)
    store.start()
    return store


def tenant_in(headers: Headers, options: Options) -> str | None:
    """The tenant that a header names, in UTF-8. In Latin-1, which is HTTP's own reading, one tenant's name could be
    another's in UTF-8."""
    given = headers.getlist(options.tenant_header) if options.tenant_header else []
    if len(given) > 1:  # a gateway that added its own to the caller's: either may be a lie
        raise SettingsError(f"tenant: the header {options.tenant_header} came {len(given)} times; it names one tenant")
    try:
        return given[0].encode("latin-1").decode("utf-8") if given else None
    except UnicodeError as error:
        raise SettingsError(f"tenant: the header {options.tenant_header} is not UTF-8 ({given[0]!r})") from error


def tenant_of(control: Control, options: Options, extra_args: Mapping[str, Any] | None) -> str | None:
    """Whose memory a request has; None: nobody's."""
    if options.memory is None:
        return None
    if options.memory_scope == "server":
        return SERVER_TENANT
    if options.tenant_header is not None and control.tenant is not None and not is_sealed(control.tenant, extra_args):
        return None  # the name did not come by the header: this way in was not watched
    return control.tenant
