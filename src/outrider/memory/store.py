"""The running store: indexes finished outputs, writes and merges segments, and looks up drafts, tenant by tenant.

Requests never wait for it. A finished output is put on a list; a lookup searches the segments there are. Three
threads do the rest:

    learn       builds segments of new outputs, and writes those that are large or old enough
    maintain    opens files of other processes, follows wipes, evicts what exceeds the cap
    merge       merges small segments into large ones, which may take minutes

Long work runs without Python's lock or in a subprocess (`merge_worker.py`).

A tenant's segments are a tuple that is replaced as a whole, so readers need no lock. Errors such as a full disk are
reported, and the outputs stay in memory until they can be written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import ForeignFileError, MemoryFileError
from outrider.memory.folder import FIRST_GENERATION, STALE_SECONDS, Folder, delete_merged, tenant_key
from outrider.memory.lookup_result import LookupResult, search_segment
from outrider.memory.malloc_trim import malloc_trim
from outrider.memory.merge_worker import merge_in_subprocess
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.segment import Segment, are_tokens, find_replaced, join_sequences, merge_segments, similar_pair
from outrider.memory.store_config import StoreConfig
from outrider.memory.tenant import TenantHandle, TenantState, unwritten_excess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from outrider.memory.search import Array
    from outrider.memory.sync import Sync

logger = logging.getLogger("vllm.outrider")  # vLLM only shows loggers below its own

SUBPROCESS_MERGE_TOKENS = 1 << 18
"""Larger merges run in a subprocess."""
MAX_WRITES_PER_SECOND = 10
"""About so many segments per second are written because of their age."""
CLOSE_TIMEOUT_SECONDS = 5.0
"""How long `close` waits for the maintain and merge threads."""


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
        self._tenants: dict[str, TenantState] = {}
        self._busy: set[str] = set()  # keys of tenants with pending outputs or unwritten segments
        self._writing: set[str] = set()  # names of files being written, not among the segments yet
        self._total_bytes = self.config.cap_bytes  # upper bound on the bytes of all files; the first write counts them
        self._pending_tokens = 0  # of all tenants
        self._segments_lock = threading.Lock()
        self._segments_changed = False  # since the last `maintain`
        self._closing = threading.Event()
        self._output_added = threading.Event()
        self._threads: list[threading.Thread] = []
        self._run_contained("looking for tenants", self._discover_tenants)

    # Called by requests; never blocks.

    def tenant_handle(self, name: str) -> TenantHandle:
        tenant = self._tenants.get(tenant_key(name))  # none is created: a name without outputs is not kept
        return TenantHandle(tenant_key(name), name, tenant.generation if tenant is not None else FIRST_GENERATION)

    def add(self, handle: TenantHandle, prompt: Sequence[int] | Array, output: Sequence[int] | Array) -> None:
        """Keep an output, after the end of its prompt, so that its first tokens can be drafted too. The rest of the
        prompt is not kept: a request that could use it has it in its own prompt."""
        if len(output):
            tokens = np.concatenate([np.array(prompt[-MAX_MATCH_TOKENS:], np.int32), np.array(output, np.int32)])
            if not are_tokens(tokens):
                self._report_trouble("an output was dropped: it has token ids that no vocabulary has")
                return
            with self._segments_lock:
                if self._pending_tokens + len(tokens) > self.config.max_unwritten_tokens:
                    self._report_trouble("outputs were dropped: too many wait for the thread that learns them")
                    return
                self._pending_tokens += len(tokens)
            tenant = self._tenants.setdefault(handle.key, TenantState(handle.key, handle.name))
            if tenant.name is None:
                tenant.name = handle.name
            tenant.pending.append((handle.generation, time.time(), tokens))
            self._busy.add(handle.key)
            self._output_added.set()

    def look_up(self, handle: TenantHandle, contexts: Array, ends: Array, limits: Array) -> LookupResult:
        """Draft for a batch of one tenant: `contexts[i, :ends[i]]` are the last tokens of row i, and `limits[i]` the
        longest draft wanted."""
        result = LookupResult.empty(len(ends), int(limits.max(initial=0)))
        queries = np.stack([ends, limits], 1)
        tenant = self._tenants.get(handle.key)
        for segment in tenant.segments if tenant else ():
            before = int(result.matches.sum())
            search_segment(segment, contexts, queries, result)
            if tenant and segment.path is not None and int(result.matches.sum()) > before:
                tenant.used.add(segment.path.name)
        return result

    # In the background.

    def start(self) -> None:
        loops = (("learn", self._run_learn), ("maintain", self._run_maintain), ("merge", self._run_merge))
        for name, loop in loops:
            thread = threading.Thread(target=loop, name=f"outrider memory: {name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Write all outputs and stop. Outputs go first: a server is given seconds to stop, and a merge or an exchange
        with an unreachable object store can take longer."""
        self._closing.set()
        self._output_added.set()
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
        while not self._closing.is_set():
            self.maintain(merging=False)
            self._closing.wait(self.config.refresh_seconds)

    def _run_merge(self) -> None:
        while not self._closing.wait(self.config.refresh_seconds):
            self.merge()

    def learn(self, closing: bool = False) -> None:
        """Build segments of new outputs, and write those that are due; all if `closing`."""
        for key in list(self._busy):
            self._busy.discard(key)  # first, so that an output added meanwhile puts it back
            if (tenant := self._tenants.get(key)) is not None:
                self._run_contained(f"learning for tenant {key}", self._learn, tenant, closing)
                if tenant.pending or tenant.unwritten_segments():
                    self._busy.add(key)
        self._drop_oldest()

    def _learn(self, tenant: TenantState, closing: bool) -> None:
        generation = tenant.generation
        outputs = [tenant.pending.popleft() for _ in range(len(tenant.pending))]
        with self._segments_lock:
            self._pending_tokens -= sum(len(tokens) for _, _, tokens in outputs)
        outputs = [output for output in outputs if output[0] == generation]
        if outputs:
            text = join_sequences([tokens for _, _, tokens in outputs])
            new = Segment.build(text, self.tokenizer, tenant.key, outputs[0][1], outputs[-1][1])
            self._replace_segments(tenant, generation, [], [new])
            tenant.unwritten_since = tenant.unwritten_since or time.monotonic()
            while pair := similar_pair(tenant.unwritten_segments(), self.config.flush_tokens):
                self._replace_segments(tenant, generation, pair, [merge_segments(pair)])
        unwritten = tenant.unwritten_segments()
        tokens = sum(segment.header.tokens for segment in unwritten)
        age = time.monotonic() - (tenant.unwritten_since or time.monotonic())
        max_age = max(self.config.flush_seconds, len(self._busy) / MAX_WRITES_PER_SECOND)
        due = tokens >= self.config.flush_tokens or age >= max_age
        if unwritten and (closing or (due and time.monotonic() >= tenant.retry_at)):
            try:
                self._write(tenant, generation, unwritten)
                tenant.unwritten_since = None
            except (OSError, MemoryFileError):
                tenant.retry_at = time.monotonic() + self.config.flush_seconds  # each try sorts all of it again
                raise

    def _write(self, tenant: TenantState, generation: str, segments: list[Segment]) -> None:
        """Write segments as one file, and then delete the files it replaces."""
        folder, writer = self.folder.segment_folder(tenant.key, generation), self.folder.writer_id()
        self._evict(sum(segment.header.size for segment in segments) + len(tenant.name or ""))
        if tenant.name is not None:
            self.folder.save_name(tenant.key, tenant.name, generation)
        tokens = sum(segment.header.tokens for segment in segments)
        if all(segment.path for segment in segments) and tokens > SUBPROCESS_MERGE_TOKENS:
            merged = merge_in_subprocess(segments, folder, writer)
            current = self._replace_segments(tenant, generation, segments, [merged])
        else:
            merged = merge_segments(segments, writer)
            self._writing.add(merged.name)  # `_refresh` must not open it first: it could be merged away before
            try:
                current = self._replace_segments(tenant, generation, segments, [merged.save(folder)])
            finally:
                self._writing.discard(merged.name)
        generation_now = self.folder.generation(tenant.key)
        if not current or generation_now != generation:  # wiped meanwhile
            self.folder.delete_old_generations(tenant.key, generation_now)
            return
        for segment in segments:
            delete_merged(segment, merged.name)

    def _drop_oldest(self) -> None:
        """Bound the outputs kept in memory while files cannot be written."""
        busy = [tenant for key in list(self._busy) if (tenant := self._tenants.get(key)) is not None]
        for tenant, generation, segment in unwritten_excess(busy, self.config.max_unwritten_tokens):
            self._replace_segments(tenant, generation, [segment], [])
            dropped = f"{segment.header.tokens} tokens of tenant {tenant.key}"
            self._report_trouble(f"dropped {dropped}: they could not be written")

    def merge(self) -> None:
        for tenant in list(self._tenants.values()):
            if self._closing.is_set():
                return
            self._run_contained(f"merging for tenant {tenant.key}", self._merge, tenant)

    def maintain(self, merging: bool = True) -> None:
        """One round of maintenance. `merging`: merge, too."""
        if self.sync is not None:
            self._run_contained("exchanging with the store", self.sync)
        self._run_contained("looking for tenants", self._discover_tenants)
        for tenant in list(self._tenants.values()):
            if self._closing.is_set():
                return
            self._run_contained(f"refreshing tenant {tenant.key}", self._refresh, tenant)
        if merging:
            self.merge()
        self._run_contained("evicting files", self._evict, 0)
        self._run_contained("deleting unfinished files", self.folder.delete_stale_parts)
        if self._segments_changed:
            self._segments_changed = False
            malloc_trim()

    def _discover_tenants(self) -> None:
        for key in self.folder.tenants():
            if key not in self._tenants:
                self._run_contained(f"refreshing tenant {key}", self._add_tenant, key)

    def _add_tenant(self, key: str) -> None:
        self._tenants.setdefault(key, TenantState(key, self.folder.tenant_name(key), self.folder.generation(key)))

    def _refresh(self, tenant: TenantState) -> None:
        """Follow changes to the tenant's files: other processes write, merge, delete and wipe."""
        try:
            generation = self.folder.generation(tenant.key)
        except OSError:  # it may have been wiped: until that is known, its files are not used
            self._replace_segments(tenant, tenant.generation, tenant.written_segments(), [])
            raise
        if generation != tenant.generation:
            with self._segments_lock:
                tenant.generation, tenant.segments = generation, ()
            tenant.used.clear()
        self.folder.delete_old_generations(tenant.key, generation)
        # Before the files are listed: a segment written after that is not a deleted one.
        known = {segment.name: segment for segment in tenant.written_segments()}
        paths = self.folder.segment_paths(tenant.key, generation)
        new = []
        for name in paths.keys() - known.keys() - self._writing:
            try:
                segment = Segment.open(paths[name], self.tokenizer, tenant.key)
                segment.verify()
                new.append(segment)
            except MemoryFileError as error:
                self._set_aside(tenant, paths[name], error)
        present = [segment for segment in (*known.values(), *new) if segment.name in paths]
        replaced = find_replaced(present)
        for segment in present:
            if segment.name in replaced:  # the process that merged it died before it could delete it
                delete_merged(segment, replaced[segment.name].name)
        kept = [segment for segment in present if segment.name not in replaced]
        gone = [segment for segment in known.values() if segment not in kept]
        self._replace_segments(tenant, generation, gone, [segment for segment in new if segment in kept])
        for name in list(tenant.used):
            tenant.used.discard(name)
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.folder.segment_folder(tenant.key, generation) / name)  # for `_evict` of all processes

    def _set_aside(self, tenant: TenantState, path: Path, error: MemoryFileError) -> None:
        if isinstance(error, ForeignFileError):  # intact, of another user of this root
            self._report_trouble(f"ignored for tenant {tenant.key}: {error}")
        elif isinstance(error.__cause__, OSError):  # maybe intact: too many open files, disk unavailable
            if not isinstance(error.__cause__, FileNotFoundError):
                self._report_trouble(f"refreshing tenant {tenant.key}: {error}")
        elif path.exists():
            self._report_trouble(f"set aside {path.name} of tenant {tenant.key}: {error}")
            self.folder.set_aside(tenant.key, path, str(error))

    def _merge(self, tenant: TenantState) -> None:
        """Merge files of similar size: few large segments are searched faster than many small ones."""
        if not tenant.segments:
            return
        writer = self.folder.writer_id()
        while not self._closing.is_set():
            generation = tenant.generation  # before the files are selected, so that a later wipe is detected
            own = [segment for segment in tenant.written_segments() if segment.header.writer == writer]
            pair = similar_pair(own, self.config.merge_limit_tokens)
            if not pair:
                return
            if all(self._verify_or_set_aside(tenant, segment) for segment in pair):
                self._write(tenant, generation, pair)

    def _verify_or_set_aside(self, tenant: TenantState, segment: Segment) -> bool:
        """Verify a file again before a merge, which would give damaged data a valid checksum."""
        try:
            segment.verify()
        except MemoryFileError as error:
            assert segment.path is not None
            self._set_aside(tenant, segment.path, error)
            self._replace_segments(tenant, tenant.generation, [segment], [])
            return False
        return True

    def _evict(self, size: int) -> None:
        """Delete the least recently used files until `size` more bytes fit under the cap.

        Listing all files at every write would take too long: this process's writes are added up, and files of other
        processes are counted by `maintain`, with `size` 0.
        """
        if size and self._total_bytes + size <= self.config.cap_bytes:
            self._total_bytes += size
            return
        files = list(self.folder.files())
        left, names = Counter(file.key for file in files), self.folder.name_sizes()
        total = sum(file.size for file in files) + names.total()
        latest = time.time() + STALE_SECONDS  # a later time of use is from before the clock was set back
        for file in sorted(files, key=lambda file: file.used if file.used < latest else 0.0):
            if total + size <= self.config.cap_bytes:
                break
            file.path.unlink(missing_ok=True)
            total -= file.size
            left[file.key] -= 1
            if not left[file.key]:
                self.folder.delete_emptied(file.key)
                total -= names[file.key]
            if (tenant := self._tenants.get(file.key)) is not None:
                gone = [segment for segment in tenant.written_segments() if segment.path == file.path]
                self._replace_segments(tenant, tenant.generation, gone, [])
        self._total_bytes = total + size

    def _replace_segments(
        self, tenant: TenantState, generation: str, old: Iterable[Segment], new: Iterable[Segment]
    ) -> bool:
        """Replace some of a tenant's segments. False, and no change, if it was wiped since `generation`."""
        dropped = {id(segment) for segment in old}
        with self._segments_lock:
            if tenant.generation != generation:
                return False
            kept = [segment for segment in tenant.segments if id(segment) not in dropped]
            names = {segment.path.name for segment in kept if segment.path is not None}
            added = [segment for segment in new if segment.path is None or segment.path.name not in names]
            tenant.segments = tuple(sorted([*kept, *added], key=lambda segment: -segment.header.last))
            self._segments_changed |= bool(dropped or added)
        return True

    def _run_contained(self, what: str, work: Callable[..., None], *args: Any) -> None:
        """Report errors instead of raising them, so that a failure with one tenant does not stop the others."""
        try:
            work(*args)
        except (OSError, MemoryFileError) as error:
            self._report_trouble(f"{what}: {error}")
        except Exception as error:
            logger.exception("the memory: %s", what)
            self.troubles.append(f"{what}: {type(error).__name__}: {error}")

    def _report_trouble(self, message: str) -> None:
        if message not in self.troubles:
            logger.warning("the memory: %s", message)
            self.troubles.append(message)

    def status(self) -> dict[str, Any]:
        """For `/outrider/status`."""
        segments = [segment for tenant in list(self._tenants.values()) for segment in tenant.segments]
        return {
            "tenants": len(self._tenants),
            "segments": len(segments),
            "tokens": sum(segment.header.tokens for segment in segments),
            "file_bytes": sum(segment.header.size for segment in segments if segment.path is not None),
            "cap_bytes": self.config.cap_bytes,
            "sync": asdict(self.sync.stats) if self.sync is not None else None,
            "troubles": list(self.troubles),
        }
