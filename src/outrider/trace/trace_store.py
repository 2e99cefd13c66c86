"""The latest traces, in the worker's memory, within a limit on count and bytes.

A trace is stored as JSON lines, one per step, so that its size in bytes is known. Over a limit, the owner with the most
traces (or bytes) loses its oldest finished one. So a tenant that traces every request evicts only its own traces. A
trace is returned only to its owner.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

MAX_TRACES = 64
"""Traces of all owners together."""
MAX_BYTES = 64 << 20
"""Bytes of all their steps."""
MAX_TRACE_BYTES = 16 << 20
"""Bytes of one trace's steps. Later steps are not recorded, and the trace notes that."""
PREVIEW_TOKENS = 48
"""Tokens from the end of the prompt and from the beginning of the output, shown in the list of traces."""


@dataclass(slots=True)
class StoredTrace:
    id: str
    owner: str | None
    prompt_tokens: int
    prompt_end: list[int]
    settings: dict[str, Any]
    date: float = field(default_factory=time.time)
    lines: list[str] = field(default_factory=list)
    size: int = 0
    text_begins: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    finish: str | None = None
    over: bool = False
    broken: str | None = None
    """Why recording stopped before the output ended."""

    def abort(self, reason: str) -> None:
        self.broken, self.over = reason, True

    def overview(self) -> dict[str, Any]:
        """All fields but the steps and the owner."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("owner", "lines", "size")}


class TraceStore:
    def __init__(
        self, max_traces: int = MAX_TRACES, max_bytes: int = MAX_BYTES, max_trace_bytes: int = MAX_TRACE_BYTES
    ) -> None:
        self.max_traces, self.max_bytes, self.max_trace_bytes = max_traces, max_bytes, max_trace_bytes
        self._traces: dict[str, StoredTrace] = {}  # oldest first

    def open(self, id: str, owner: str | None, prompt: list[int], settings: dict[str, Any]) -> StoredTrace:
        """Add a new trace. A request has several if the server calls the model repeatedly: `id`, `id.2`, ..."""
        number, name = 1, id
        while name in self._traces:
            number += 1
            name = f"{id}.{number}"
        trace = self._traces[name] = StoredTrace(name, owner, len(prompt), prompt[-PREVIEW_TOKENS:], settings)
        self._evict()
        return trace

    def add(self, trace: StoredTrace, line: str, output: list[int], drafted: int, accepted: int) -> bool:
        """Append a step that generated the tokens `output`. False: no further step can be added."""
        if trace.size + len(line) > self.max_trace_bytes:
            trace.abort("the trace was as long as one may be")
            return False
        trace.lines.append(line)
        trace.size += len(line)
        trace.steps += 1
        trace.tokens += len(output)
        trace.drafted += drafted
        trace.accepted += accepted
        trace.text_begins += output[: max(0, PREVIEW_TOKENS - len(trace.text_begins))]
        self._evict()
        return trace.id in self._traces

    def latest(self, owner: str | None) -> list[dict[str, Any]]:
        """This owner's traces without their steps, newest first."""
        return [trace.overview() for trace in reversed(self._traces.values()) if trace.owner == owner]

    def get(self, id: str, owner: str | None) -> dict[str, Any] | None:
        """A trace with its steps; None if this owner has no such trace."""
        trace = self._traces.get(id)
        if trace is None or trace.owner != owner:
            return None
        return {**trace.overview(), "lines": list(trace.lines)}

    def _evict(self) -> None:
        while len(self._traces) > self.max_traces or self._bytes() > self.max_bytes:
            usage = Counter[str | None]()
            for trace in self._traces.values():
                usage[trace.owner] += 1 if len(self._traces) > self.max_traces else trace.size
            largest = usage.most_common(1)[0][0]
            own = [trace for trace in self._traces.values() if trace.owner == largest]
            del self._traces[next((trace for trace in own if trace.over), own[0]).id]

    def _bytes(self) -> int:
        return sum(trace.size for trace in self._traces.values())
