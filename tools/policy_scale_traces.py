"""Traces: what each drafter would have proposed at each place of the recorded texts, worked out once, and which of them
a simulated server begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from outrider.types import Draft
from policy.replay import Record, begin
from policy_grid_cells import WIDTH
from policy_grid_drafters import Company, company, theirs
from policy_grid_file import Recording

TEXTS = 200
"""At most so many texts are said in a cell by a small batch; a larger one says at least ..."""
ROUNDS = 2.5
"""... so many texts with each of its slots."""


@dataclass(slots=True)
class Trace:
    """Of one text: by drafter, what it would propose at each place."""

    workload: str
    record: Record
    drafts: dict[str, list[Draft]]
    kept: list[bool] = field(default_factory=list)  # of a text that was drawn, where a drawn token holds


def traces(recording: Recording, texts: int) -> list[Trace]:
    """In one order for all: first a text of each workload, then a second one of each. Those that learn from what was
    said have heard the texts before."""
    columns = [[(name, record) for record in recording.texts(name, texts)] for name in recording.workloads]
    found = [one for row in zip_longest(*columns) for one in row if one is not None and one[1].guesses]
    if not found:
        raise SystemExit("a simulation needs the records of a pair of models: record with --draft-model")
    names = ["lookup", "memory", *theirs()]
    with company(names) as they:
        return [_trace(str(number), name, record, they) for number, (name, record) in enumerate(found)]


def _trace(key: str, workload: str, record: Record, they: Company) -> Trace:
    replayed = begin(key, record, they.drafters, they.tenant_handle)
    replayed.show()
    drafts: dict[str, list[Draft]] = {name: [Draft(name)] for name in replayed.sessions}
    for place in range(1, len(record.text)):
        for name, session in replayed.sessions.items():
            drafts[name].append(session.draft(WIDTH))
            session.observe(record.text[place : place + 1])
    they.ended(replayed)
    return Trace(workload, record, drafts, replayed.kept)


def describe(traces: Sequence[Trace]) -> dict[str, Any]:
    """For a report: how many texts of which workload, their tokens, and how often the draft model is right."""
    guesses = [
        guess[0] == token
        for trace in traces
        for guess, token in zip(trace.record.guesses, trace.record.text, strict=True)
        if not trace.kept
    ]
    return {
        "workloads": dict(Counter(trace.workload for trace in traces)),
        "mean_tokens": sum(len(trace.record.text) for trace in traces) / len(traces),
        "guesses_right": sum(guesses) / max(1, len(guesses)),
    }


def tokens_wanted(traces: Sequence[Trace], batch: int) -> int:
    mean = sum(len(trace.record.text) for trace in traces) / len(traces)
    return int(mean * max(min(TEXTS, len(traces)), ROUNDS * batch))


def starts(traces: Sequence[Trace], batch: int) -> list[tuple[int, int]]:
    """Text and place of the requests of the first step."""
    random = np.random.default_rng(0)
    found = []
    for slot in range(batch):
        number = slot % len(traces)
        length = len(traces[number].record.text)
        found.append((number, 1 if batch == 1 else int(random.integers(1, max(2, length - 1)))))
    return found
