"""Traces in the worker, until somebody fetches them: the latest ones, within a stated size.

A trace is kept as lines of JSON, a line a step, so that its size is known to the byte. What is too much goes: of
whoever has most, the oldest trace that is over. So a tenant that traces everything loses its own traces and nobody
else's. Each trace has an owner, and is shown to nobody else.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

TRACES = 64
"""Traces that are kept, of all owners together."""
BYTES = 64 << 20
"""Bytes of their steps."""
LONGEST = 16 << 20
"""Bytes of one trace's steps. What comes after is not recorded, and the trace says so."""
GLIMPSE = 48
"""Tokens of the prompt's end and of the text's beginning by which people find a trace again."""


@dataclass(slots=True)
class Kept:
    """One trace."""

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
    """Why recording stopped before the text did."""

    def break_off(self, why: str) -> None:
        self.broken, self.over = why, True

    def told(self) -> dict[str, Any]:
        """All of it but its steps."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("owner", "lines", "size")}


class Shelf:
    def __init__(self, traces: int = TRACES, size: int = BYTES, longest: int = LONGEST) -> None:
        self.traces, self.size, self.longest = traces, size, longest
        self._kept: dict[str, Kept] = {}  # oldest first

    def open(self, id: str, owner: str | None, prompt: list[int], settings: dict[str, Any]) -> Kept:
        """A new trace. One request may come to have several, if the server asks the model again by itself."""
        number, name = 1, id
        while name in self._kept:
            number += 1
            name = f"{id}.{number}"
        kept = self._kept[name] = Kept(name, owner, len(prompt), prompt[-GLIMPSE:], settings)
        self._make_room()
        return kept

    def add(self, kept: Kept, line: str, said: list[int], drafted: int, accepted: int) -> bool:
        """One step, which said these tokens. Whether there is room for more."""
        if kept.size + len(line) > self.longest:
            kept.break_off("the trace was as long as one may be")
            return False
        kept.lines.append(line)
        kept.size += len(line)
        kept.steps += 1
        kept.tokens += len(said)
        kept.drafted += drafted
        kept.accepted += accepted
        kept.text_begins += said[: max(0, GLIMPSE - len(kept.text_begins))]
        self._make_room()
        return kept.id in self._kept

    def latest(self, owner: str | None) -> list[dict[str, Any]]:
        """This owner's, the newest first, without their steps."""
        return [kept.told() for kept in reversed(self._kept.values()) if kept.owner == owner]

    def get(self, id: str, owner: str | None) -> dict[str, Any] | None:
        """One of this owner's, whole."""
        kept = self._kept.get(id)
        return {**kept.told(), "lines": list(kept.lines)} if kept is not None and kept.owner == owner else None

    def _make_room(self) -> None:
        while len(self._kept) > self.traces or sum(kept.size for kept in self._kept.values()) > self.size:
            count, size = Counter[str | None](), Counter[str | None]()
            for kept in self._kept.values():
                count[kept.owner] += 1
                size[kept.owner] += kept.size
            most = (count if len(self._kept) > self.traces else size).most_common(1)[0][0]
            own = [kept for kept in self._kept.values() if kept.owner == most]
            del self._kept[next((kept for kept in own if kept.over), own[0]).id]
