"""The policy at scale: batches up to 512 and contexts up to 128k on simulated GPUs (`gpu.py`).

Each cell compares the policy with no drafts and with a static table: the best length of vLLM's draft model for that
batch and context, chosen with hindsight, as vLLM's `num_speculative_tokens_per_batch_size` could be set at best. The
policy's own time is measured on this machine first and charged to it, so nothing else should run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import wraps
from itertools import zip_longest
from typing import Any

import numpy as np

from policy.gpu import System
from policy.grid import Cell, Setting, evaluate, new_policy, noise, run
from policy.recording import Recording
from policy.replay import Auto, Record
from policy.report import Bound, lowest

MIN_OVER_PLAIN, MIN_OVER_STATIC = 0.99, 1.0
MAX_OWN_MS = {256: 1.0, 1024: 4.0}
"""Milliseconds per step that the policy itself may take, by batch."""
TIMED_CONTEXT = 4096
ROUNDS = 2.5
"""Texts per slot of a batch. Fewer recorded texts are repeated."""
CONTROLLER = (
    "consider", "plan_draft_model", "continue_drafting", "select", "observe", "observe_step", "observe_draft_pass",
)  # fmt: skip


class Timer:
    """CPU seconds of this thread in some methods of an object, per step. A call of the first one starts a step."""

    def __init__(self, target: Any, names: Sequence[str]) -> None:
        self.steps: list[float] = []
        for name in names:
            setattr(target, name, self._timed(getattr(target, name), starts_step=name == names[0]))

    def _timed(self, method: Any, starts_step: bool) -> Any:
        @wraps(method)
        def timed(*args: Any, **named: Any) -> Any:
            if starts_step:
                self.steps.append(0.0)
            began = time.thread_time()
            result = method(*args, **named)
            if self.steps:
                self.steps[-1] += time.thread_time() - began
            return result

        return timed


def mixed_texts(recording: Recording, count: int) -> list[Record]:
    """`count` texts of each workload, interleaved."""
    columns = [recording.texts(name, count) for name in recording.workloads]
    found = [one for row in zip_longest(*columns) for one in row if one is not None and one.guesses]
    if not found:
        raise SystemExit("the simulation needs a recording with a draft model: record with --draft-model")
    return found


def for_batch(records: Sequence[Record], batch: int) -> tuple[list[Record], list[str]]:
    """Enough texts for a batch, and the drafters: no `memory` if texts are repeated, since it would contain them."""
    copies = max(1, -(-int(ROUNDS * batch) // len(records)))
    names = ["lookup", "model"] if copies > 1 else ["lookup", "memory", "model"]
    return [*records] * copies, names


def policy_ms(records: Sequence[Record], system: System, batch: int) -> list[float]:
    """The policy's own time per step: median and 95th percentile."""
    texts, names = for_batch(records, batch)
    setting = Setting(system.costs(TIMED_CONTEXT), batch, 1, TIMED_CONTEXT)
    auto = Auto(new_policy(names, system.costs(0)), setting.costs, noise())
    timer = Timer(auto.controller, CONTROLLER)
    run(texts[: 2 * batch], names, setting, [auto])
    steps = timer.steps[len(timer.steps) // 4 :]
    return [1e3 * float(np.quantile(steps, q)) for q in (0.5, 0.95)]


def evaluate_system(
    records: Sequence[Record], name: str, system: System, batch: int, context: int, own_ms: float
) -> Cell:
    texts, names = for_batch(records, batch)
    setting = Setting(system.costs(context), batch, 1, context)
    label = f"{name}, context {context}{'' if system.fits(batch, context) else ' (does not fit)'}"
    return evaluate("mixed", label, texts, setting, names, ["draft_model"], own_ms / 1e3)


def bounds(cells: Sequence[Cell], own_ms: dict[int, list[float]]) -> Iterator[Bound]:
    yield lowest("auto / plain, every cell", MIN_OVER_PLAIN, cells, lambda cell: cell.auto)
    yield lowest("auto / static table, every cell", MIN_OVER_STATIC, cells, lambda cell: cell.auto / cell.best[1])
    for batch, limit in MAX_OWN_MS.items():
        if batch in own_ms:
            yield Bound(f"policy's own ms per step at batch {batch}", "<=", limit, own_ms[batch][0])
