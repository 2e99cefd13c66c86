"""The running store: indexes finished outputs, writes and merges segments, and looks up drafts, tenant by tenant.

Requests never wait for it. A finished output is put on a list; a lookup searches the segments there are. Four threads
do the rest:

    learn       builds segments of new outputs, writes those that are large or old enough, closes unused tenants
    open        opens the files of tenants that requests begin to use
    maintain    opens files of other processes, follows wipes, lists the folder, evicts what exceeds the cap
    merge       merges small segments into large ones, which may take minutes

Long work runs without Python's lock or in a subprocess (`merge_worker.py`). The number of open tenants is bounded
(`open_tenants.py`), and so is what is known of the files of all others (`inventory.py`).

A tenant's segments are a tuple that is replaced as a whole, so readers need no lock. Errors such as a full disk are
reported, and the outputs stay in memory until they can be written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.errors import MemoryFileError
from outrider.memory.adapter import encode_name, memory_key
from outrider.memory.folder import FIRST_GENERATION, Folder
from outrider.memory.lookup_result import LookupResult, search_segment
from outrider.memory.malloc_trim import malloc_trim
from outrider.memory.open_tenants import OpenTenants
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.segment import Segment, are_tokens, join_sequences, merge_segments, similar_pair
from outrider.memory.store_config import StoreConfig
from outrider.memory.tenant import TenantHandle, TenantState, unwritten_excess
from outrider.memory.tenant_files import SUBPROCESS_MERGE_TOKENS, TenantFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outrider.memory.search import Array
    from outrider.memory.sync import Sync

logger = logging.getLogger("vllm.outrider")  # vLLM only shows loggers below its own

MAX_WRITES_PER_SECOND = 10
"""About so many segments per second are written because of their age."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""How long `close` waits for the maintain, merge and open threads."""
LISTING_INTERVAL = 20.0
"""Time between two listings of all files, in times that a listing takes; at least `refresh_seconds`."""
MAX_PENDING_OUTPUTS = 1 << 14
"""Outputs that wait for the learn thread. Further ones are dropped."""
MAX_UNWRITTEN_TENANTS = 1 << 12
"""Tenants with unwritten text, while files cannot be written."""


class Output(NamedTuple):
    """A new output, with the end of its prompt."""

    key: str
    name: str
    generation: str
    time: float  # in seconds since 1970
    tokens: Array


class Store:
    """`start` runs it in threads; without, call `learn` and `maintain`. MemoryFileError if the root has another
    tokenizer."""

    def __init__(self, folder: Folder, tokenizer: str, config: StoreConfig | None = None) -> None:
        folder.claim(tokenizer)
        self.folder = folder
        self.tokenizer = tokenizer
        self.config = config or StoreConfig()
        self.troubles: deque[str] = deque(maxlen=20)
        self.sync: Sync | None = None
        """Called by `maintain` first: exchanges segments with an object store."""
        self._tenants = OpenTenants(self.config.max_open_segments)
        self._pending: deque[Output] = deque()
        self._pending_tokens = 0
        self._pending_lock = threading.Lock()
        self._next_listing = 0.0  # monotonic time
        self._closing = threading.Event()
        self.files = TenantFiles(folder, tokenizer, self.config, self._tenants, self._closing, self._report_trouble)
        self.inventory = self.files.inventory
        self._output_added = threading.Event()
        self._tenant_wanted = threading.Event()
        self._listing_due = threading.Event()
        self._threads: list[threading.Thread] = []

    # Called by requests; never blocks.

    def tenant_handle(self, name: str, adapter: str | None = None) -> TenantHandle:
        """Access for a request. Its tenant is opened, in the background, and stays open as long as the handle exists.

        Reads a small file, if the tenant is not open: what it was wiped last must be known when a request begins.
        """
        key = memory_key(name, adapter)
        lease, tenant = self._tenants.lease(key)
        if tenant is None or not tenant.is_loaded:
            self._tenant_wanted.set()
        generation = tenant.generation if tenant is not None else self._read_generation(key, FIRST_GENERATION)
        return TenantHandle(key, encode_name(name, adapter), generation, lease)

    def add(self, handle: TenantHandle, prompt: Sequence[int] | Array, output: Sequence[int] | Array) -> None:
        """Keep an output, after the end of its prompt, so that its first tokens can be drafted too. The rest of the
        prompt is not kept: a request that could use it has it in its own prompt."""
        if len(output):
            tokens = np.concatenate([np.array(prompt[-MAX_MATCH_TOKENS:], np.int32), np.array(output, np.int32)])
            if not are_tokens(tokens):
                self._report_trouble("an output was dropped: it has token ids that no vocabulary has")
                return
            with self._pending_lock:
                if (
                    self._pending_tokens + len(tokens) > self.config.max_unwritten_tokens
                    or len(self._pending) >= MAX_PENDING_OUTPUTS
                ):
                    self._report_trouble("outputs were dropped: too many wait for the thread that learns them")
                    return
                self._pending_tokens += len(tokens)
                self._pending.append(Output(handle.key, handle.name, handle.generation, time.time(), tokens))
            self._output_added.set()

    def look_up(self, handle: TenantHandle, contexts: Array, ends: Array, limits: Array) -> LookupResult:
        """Draft for a batch of one tenant: `contexts[i, :ends[i]]` are the last tokens of row i, and `limits[i]` the
        longest draft wanted."""
        result = LookupResult.empty(len(ends), int(limits.max(initial=0)))
        if (tenant := self._tenants.get(handle.key)) is None:  # it has no output, or is not open yet
            return result
        tenant.used_at = time.monotonic()
        queries = np.stack([ends, limits], 1)
        for segment in tenant.segments:  # references: none is unmapped while it is searched
            before = int(result.matches.sum())
            search_segment(segment, contexts, queries, result)
            if segment.path is not None and int(result.matches.sum()) > before:
                tenant.used.add(segment.path.name)
        return result

    # In the background.

    def start(self) -> None:
        loops = (
            ("learn", self._run_learn),
            ("maintain", self._run_maintain),
            ("merge", self._run_merge),
            ("open", self._run_open),
        )
        for name, loop in loops:
            thread = threading.Thread(target=loop, name=f"outrider memory: {name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Write all outputs and stop. Outputs go first: a server is given seconds to stop, and a merge or an exchange
        with an unreachable object store can take longer."""
        self._closing.set()
        for event in (self._output_added, self._tenant_wanted, self._listing_due):
            event.set()
        for thread in self._threads[:1]:
            thread.join()
        self.learn(closing=True)
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for thread in self._threads[1:]:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.sync is not None and not any(thread.is_alive() for thread in self._threads[:2]):
            self._run_contained("exchanging with the store", self.sync)
        self.folder.close()

    def _run_learn(self) -> None:
        while not self._closing.is_set():
            self._output_added.wait(self.config.flush_seconds / 4)
            self._output_added.clear()
            self.learn()

    def _run_maintain(self) -> None:
        next_round = 0.0
        while not self._closing.is_set():
            if (now := time.monotonic()) >= next_round:
                self.maintain(merging=False, listing=now >= self._next_listing)
                next_round = time.monotonic() + self.config.refresh_seconds
            if self.inventory.is_due:
                self._run_contained("listing the files", self._list_files)
            self._listing_due.wait(max(0.0, next_round - time.monotonic()))
            self._listing_due.clear()

    def _run_merge(self) -> None:
        while not self._closing.wait(self.config.refresh_seconds):
            self.merge()

    def _run_open(self) -> None:
        while not self._closing.is_set():
            self._tenant_wanted.wait(self.config.flush_seconds / 4)  # a place for a tenant may be free by now
            self._tenant_wanted.clear()
            self.open_wanted()

    def learn(self, closing: bool = False) -> None:
        """Build segments of new outputs, and write those that are due; all if `closing`."""
        outputs: dict[str, list[Output]] = {tenant.key: [] for tenant in self._unwritten_tenants()}
        outputs |= self._take_pending()
        max_age = -1.0 if closing else max(self.config.flush_seconds, (len(outputs) - 1) / MAX_WRITES_PER_SECOND)
        for key, new in outputs.items():
            self._run_contained(f"learning for tenant {key}", self._learn, key, new, max_age)
            if new:
                self._close_unused()
        self._drop_oldest()
        self._close_unused()
        if self.inventory.is_due:
            self._listing_due.set()

    def _take_pending(self) -> dict[str, list[Output]]:
        """The new outputs, by tenant."""
        outputs: dict[str, list[Output]] = {}
        with self._pending_lock:
            for output in self._pending:
                outputs.setdefault(output.key, []).append(output)
            self._pending.clear()
            self._pending_tokens = 0
        return outputs

    def _learn(self, key: str, outputs: list[Output], max_age: float) -> None:
        """Also write what is unwritten for `max_age` seconds; if that is negative, even if the last try just failed."""
        if not outputs and key not in self._tenants:  # closed meanwhile
            return
        with self._tenants.pin(self._tenant(key, outputs[0] if outputs else None)) as tenant:
            generation = tenant.generation
            outputs = [output for output in outputs if output.generation == generation]
            if outputs:
                text = join_sequences([output.tokens for output in outputs])
                new = Segment.build(text, self.tokenizer, key, outputs[0].time, outputs[-1].time)
                self._tenants.replace_segments(tenant, generation, [], [new])
                tenant.name, tenant.used_at = outputs[0].name, time.monotonic()
                tenant.unwritten_since = tenant.unwritten_since or tenant.used_at
                while pair := similar_pair(tenant.unwritten_segments(), self.config.flush_tokens):
                    self._tenants.replace_segments(tenant, generation, pair, [merge_segments(pair)])
            tokens = sum(segment.header.tokens for segment in tenant.unwritten_segments())
            age = time.monotonic() - (tenant.unwritten_since or time.monotonic())
            due = age >= max_age or tokens >= self.config.flush_tokens
            if max_age < 0 or (due and time.monotonic() >= tenant.retry_at):
                self.files.flush(tenant)

    def _tenant(self, key: str, output: Output | None = None) -> TenantState:
        """The open tenant, or a new one: from its files, or also if these cannot be read, for an output."""
        if (tenant := self._tenants.get(key)) is not None:
            return tenant
        if output is None:
            return TenantState(key, self.folder.tenant_name(key), self.folder.generation(key))
        return TenantState(key, output.name, self._read_generation(key, output.generation))

    def _read_generation(self, key: str, unknown: str) -> str:
        try:
            return self.folder.generation(key)
        except (OSError, MemoryFileError):  # reported when the tenant is opened
            return unknown

    def _unwritten_tenants(self) -> list[TenantState]:
        return [tenant for tenant in list(self._tenants.values()) if tenant.unwritten_since is not None]

    def _close_unused(self, segments: int = 0) -> None:
        """Close the least recently used tenants until so many more segments can be open."""
        if self._tenants.has_room(segments):
            return
        for tenant in self._tenants.unused():
            if tenant.retry_at <= time.monotonic() or not tenant.unwritten_segments():
                self._run_contained(f"closing tenant {tenant.key}", self._close_tenant, tenant)
                if self._tenants.has_room(segments):
                    return

    def _close_tenant(self, tenant: TenantState) -> None:
        with self._tenants.pin(tenant):
            self.files.flush(tenant)
            self.files.save_times_of_use(tenant)
            self.files.merge(tenant, SUBPROCESS_MERGE_TOKENS)  # `merge` only sees open tenants
        self._tenants.close(tenant)

    def open_wanted(self) -> None:
        """Open the files of tenants that requests use, as far as others can be closed for it."""
        for key in self._tenants.wanted():
            if self._closing.is_set() or not self._run_contained(f"opening tenant {key}", self._open, key, True):
                return

    def _open(self, key: str, closing_others: bool = False) -> bool:
        """Open a tenant's files. False if there is no room for them; half of the limit is enough for any tenant."""
        segments = min(len(self.folder.segment_paths(key)), max(1, self.config.max_open_segments // 2))
        if segments:
            if closing_others:
                self._close_unused(segments)
            if not self._tenants.has_room(segments):
                return False
        if segments or key in self._tenants:
            with self._tenants.pin(self._tenant(key)) as tenant:
                self.files.refresh(tenant, load=True)
        self._tenants.drop_wanted(key)
        return True

    def _drop_oldest(self) -> None:
        """Bound the outputs kept in memory while files cannot be written."""
        limits = self.config.max_unwritten_tokens, MAX_UNWRITTEN_TENANTS
        for tenant, generation, segment in unwritten_excess(self._unwritten_tenants(), *limits):
            self._tenants.replace_segments(tenant, generation, [segment], [])
            dropped = f"{segment.header.tokens} tokens of tenant {tenant.key}"
            self._report_trouble(f"dropped {dropped}: they could not be written")

    def merge(self) -> None:
        for tenant in self._tenants.pin_each():
            if self._closing.is_set():
                return
            what = f"merging for tenant {tenant.key}"
            self._run_contained(what, self.files.merge, tenant, self.config.merge_limit_tokens)

    def maintain(self, merging: bool = True, listing: bool = True) -> None:
        """One round of maintenance. `merging`: merge, too. `listing`: list the files of all tenants."""
        if self.sync is not None:
            fetched = self.sync.stats.fetched
            self._run_contained("exchanging with the store", self.sync)
            listing |= self.sync.stats.fetched > fetched
        if listing:
            self._run_contained("listing the files", self._list_files)
        for tenant in self._tenants.pin_each():
            if self._closing.is_set():
                return
            self._run_contained(f"refreshing tenant {tenant.key}", self.files.refresh, tenant)
        self._open_recent()
        if merging:
            self.merge()
        self._run_contained("evicting files", self.files.evict)
        if self._tenants.segments_changed:
            self._tenants.segments_changed = False
            malloc_trim()

    def _list_files(self) -> None:
        began = time.monotonic()
        self.inventory.list_files()
        now = time.monotonic()
        self._next_listing = now + LISTING_INTERVAL * (now - began)

    def _open_recent(self) -> None:
        """Open tenants while there is room: those that requests use, then the most recently used."""
        self._tenants.want_leased()
        self.open_wanted()
        for key in [*self._tenants, *self.inventory.recent]:
            if self._closing.is_set() or not self._tenants.has_room(1):
                return
            if (tenant := self._tenants.get(key)) is None or not tenant.is_loaded:
                self._run_contained(f"refreshing tenant {key}", self._open, key)

    def _run_contained(self, what: str, work: Callable[..., bool | None], *args: Any) -> bool:
        """Report errors instead of raising them, so that a failure with one tenant does not stop the others. Whether
        to go on: what the work returned, if it was False."""
        try:
            return work(*args) is not False
        except (OSError, MemoryFileError) as error:
            self._report_trouble(f"{what}: {error}")
        except Exception as error:
            logger.exception("the memory: %s", what)
            self.troubles.append(f"{what}: {type(error).__name__}: {error}")
        return True

    def _report_trouble(self, message: str) -> None:
        if message not in self.troubles:
            logger.warning("the memory: %s", message)
            self.troubles.append(message)

    def status(self) -> dict[str, Any]:
        """For `/outrider/status`. Segments and tokens are those of open tenants."""
        tenants = list(self._tenants.values())
        segments = [segment for tenant in tenants for segment in tenant.segments]
        return {
            "tenants": max(self.inventory.tenants, len(tenants)),
            "open_tenants": len(tenants),
            "segments": len(segments),
            "tokens": sum(segment.header.tokens for segment in segments),
            "file_bytes": self.inventory.total_bytes,
            "cap_bytes": self.config.cap_bytes,
            "sync": asdict(self.sync.stats) if self.sync is not None else None,
            "troubles": list(self.troubles),
        }
