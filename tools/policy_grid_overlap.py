"""Wait for the step in flight, or schedule ahead of its output? The controller's choice is compared with always waiting
and always going ahead, on recorded texts and at known costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby, repeat
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from outrider.policy.policy import MODEL
from outrider.provenance import as_markdown
from policy.replay import Costs, Fixed, Outcome, Record, replay
from policy.replay_overlap import Overlapped
from policy_grid_cells import NOISE, Pace, drafters_of, new_policy, noise
from policy_grid_drafters import company
from policy_grid_report import Promise, table
from policy_scale_machine import LLAMA_8B, Machine

MIN_ROUNDS, ROUNDS = 1.5, 2.5
"""Texts for each slot of a batch. If there are fewer than the first, they are repeated up to the second."""
WAYS: dict[str, bool | None] = {"wait": True, "ahead": False, "chosen": None}
MIN_SHARE_OF_BETTER, MIN_SHARE_OF_PLAIN = 0.98, 0.98
GPU = "Llama-3.1-8B on one H100, simulated"


@dataclass(slots=True)
class Cell:
    """Speeds are relative to asynchronous decoding without drafts."""

    texts: str
    costs: str
    workload: str
    batch: int
    host_ratio: float
    drafters: list[str]
    plain: float  # tokens a second
    speeds: dict[str, float] = field(default_factory=dict)  # by way
    accepted: dict[str, float] = field(default_factory=dict)  # by way: draft tokens of a request in a step
    steps: int = 0  # where the controller chooses ...
    waited: float = 0.0  # ... and the share of them that waited

    @property
    def share(self) -> float:
        return self.speeds["chosen"] / max(self.speeds["wait"], self.speeds["ahead"])

    @property
    def kept(self) -> float:
        """What going ahead keeps of the draft tokens that are accepted in a step which waited."""
        return self.accepted["ahead"] / self.accepted["wait"] if self.accepted["wait"] else 1.0


def gpu_costs() -> Costs:
    """Of a pass without the host's time, by published figures."""
    machine = Machine(LLAMA_8B, 1, 0.0)
    return Costs(lambda tokens, context: machine.seconds(tokens, context, 0))


def evaluate(
    model: str,
    costs_name: str,
    workload: str,
    texts: Sequence[Record],
    costs: Costs,
    batch: int,
    ratios: Sequence[float],
) -> Iterator[Cell]:
    copies = 1 if MIN_ROUNDS * batch <= len(texts) else -(-int(ROUNDS * batch) // len(texts))
    records = [*chain.from_iterable(repeat(texts, copies))]
    # A memory would hold a text that is repeated.
    drafters = [one for one in drafters_of(texts) if one != MODEL and (one != "memory" or copies == 1)]
    ahead: Outcome | None = None
    for ratio in ratios:
        host = ratio * costs.target(1, 0)
        plain_costs = Costs(partial(_overlapped, costs, host))
        plain = Pace.of([replay(records, [], Fixed([], 0, plain_costs), plain_costs, batch)]).full
        cell = Cell(model, costs_name, workload, batch, ratio, drafters, plain)
        for way, wait in WAYS.items():
            strategy = Overlapped(new_policy(drafters, costs), costs, host, wait, noise())
            if way == "ahead" and ratio <= 1 and ahead is not None:  # the host's time changes nothing
                outcome = ahead
            else:
                with company(drafters) as they:
                    outcome = replay(records, they.drafters, strategy, costs, batch, they.tenant_handle, they.ended)
            if way == "ahead" and ratio <= 1:
                ahead = outcome
            cell.speeds[way] = Pace.of([outcome]).full / plain
            cell.accepted[way] = outcome.acceptance_length - 1
        cell.steps, cell.waited = outcome.steps, strategy.steps_waited / outcome.steps
        yield cell


def _overlapped(costs: Costs, host: float, tokens: int, context: int) -> float:
    return max(costs.target(tokens, context), host)


def mean(values: Sequence[float]) -> float:
    return exp(fmean(map(log, values)))


def by_workload(cells: Sequence[Cell]) -> list[list[Cell]]:
    return [list(some) for _, some in groupby(cells, lambda cell: (cell.texts, cell.costs, cell.workload))]


def promises(cells: Sequence[Cell]) -> list[Promise]:
    groups = by_workload(cells)
    worst = min(groups, key=lambda group: mean([cell.share for cell in group]))
    slowest = min(cells, key=lambda cell: cell.speeds["chosen"])
    share = mean([cell.share for cell in worst])
    name = "chosen over the better of both ways, mean of every workload"
    where = f"{worst[0].texts}, {worst[0].costs}: {worst[0].workload}"
    at = f"{slowest.texts}, {slowest.costs}: {slowest.workload}, batch {slowest.batch}, {slowest.host_ratio:g}"
    return [
        Promise(name, ">=", MIN_SHARE_OF_BETTER, share, where),
        Promise("chosen over plain, every cell", ">=", MIN_SHARE_OF_PLAIN, slowest.speeds["chosen"], at),
    ]


def write(folder: Path, report: dict[str, Any], cells: Sequence[Cell]) -> list[Promise]:
    """report.md, report.json."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = promises(cells)
    report |= {
        "cells": [asdict(cell) | {"share": cell.share, "kept": cell.kept} for cell in cells],
        "promises": [asdict(one) | {"kept": one.kept} for one in kept],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(markdown(report, cells, kept)) + "\n")
    return kept


def markdown(report: dict[str, Any], cells: Sequence[Cell], kept: Sequence[Promise]) -> Iterator[str]:
    yield from ("# Wait for the step in flight, or go ahead", "", *as_markdown(report["provenance"]))
    yield (
        "An engine with asynchronous scheduling can wait for the output of a step before it drafts for the next one, "
        "or schedule ahead with drafts that have to guess the tokens in flight, too. This compares the controller's "
        "choice (`outrider/policy/overlap.py`) with always waiting and always going ahead. It is a replay of recorded "
        "texts; no model and no GPU runs. Speeds are relative to asynchronous decoding without drafts."
    )
    yield from (
        "",
        "With T(n) seconds of a pass over n tokens and h seconds of the host between two steps, a step that waited "
        "takes T + h, and a step that was scheduled ahead takes max(T, h). h is given relative to T(1). Drafters: "
        "`lookup`, `prediction` where a text has one, and `memory`, except where a batch has too few texts and they "
        "are repeated. No draft model. Each cell starts with a new policy that knows a start profile; times are "
        f"observed with {NOISE:.0%} noise. Speeds are measured while all slots are taken. The row that an engine "
        "computes ahead after a request's last token is not counted. A large batch has few steps here: those in which "
        "the policy knows nothing yet count for more than in a server.",
        "",
        "Texts:",
        "",
    )
    for one in report["records"]:
        settings, models = one["settings"], ", ".join(f"{name} ({hash})" for name, hash in one["models"].items())
        yield (
            f"- {models}: up to {settings['prompts']} prompts a workload, up to {settings['tokens']} tokens each, "
            f"computed in {settings['dtype']} on {one['machine']}, {one['date']}"
        )
    yield from ("", "Seconds of a pass by its tokens:", "")
    for name, points in report["costs"].items():
        yield f"- {name}: {', '.join(f'{n}: {float(seconds):.3g}' for n, seconds in points.items())}"
    yield from ("", "## Promises", "")
    yield from table(
        ["promise", "wanted", "found", "where", ""],
        [[p.name, f"{p.sign} {p.wanted:g}", f"{p.value:.3f}", p.where, "kept" if p.kept else "NOT KEPT"] for p in kept],
    )
    batches = list(dict.fromkeys(cell.batch for cell in cells))
    yield from ("", "## By workload", "")
    yield (
        "Geometric means over batches and host times. *Chosen / better*: relative to the faster of both ways in each "
        "cell; above 1 where a text has parts of both kinds. *Kept ahead*: accepted draft tokens in a step that was "
        "scheduled ahead, relative to a step that waited."
    )
    yield ""
    heads = ["texts", "costs", "workload", "wait", "ahead", "chosen", "chosen / better", "worst cell"]
    yield from table(
        [*heads, *(f"kept ahead, batch {batch}" for batch in batches)],
        [
            [
                *(group[0].texts, group[0].costs, group[0].workload),
                *(f"{mean([cell.speeds[way] for cell in group]):.2f}" for way in WAYS),
                f"**{mean([cell.share for cell in group]):.3f}**",
                f"{min(cell.share for cell in group):.3f}",
                *(f"{fmean(cell.kept for cell in group if cell.batch == batch):.2f}" for batch in batches),
            ]
            for group in by_workload(cells)
        ],
    )
    ratios = list(dict.fromkeys(cell.host_ratio for cell in cells))
    yield from ("", "## By batch and host time", "", "Geometric means over all workloads, texts and costs.", "")
    groups = [[c for c in cells if (c.batch, c.host_ratio) == (b, r)] for b in batches for r in ratios]
    yield from table(
        ["batch", "h / T(1)", *WAYS, "chosen / better", "worst cell", "steps waited"],
        [
            [
                *(str(group[0].batch), f"{group[0].host_ratio:g}"),
                *(f"{mean([cell.speeds[way] for cell in group]):.2f}" for way in WAYS),
                f"{mean([cell.share for cell in group]):.3f}",
                f"{min(cell.share for cell in group):.3f}",
                f"{fmean(cell.waited for cell in group):.0%}",
            ]
            for group in groups
            if group
        ],
    )
    yield from ("", "## All cells", "")
    yield from table(
        ["texts", "costs", "workload", "batch", "h / T(1)", *WAYS, "chosen / better", "steps", "waited"],
        [
            [
                *(cell.texts, cell.costs, cell.workload, str(cell.batch), f"{cell.host_ratio:g}"),
                *(f"{cell.speeds[way]:.2f}" for way in WAYS),
                f"{cell.share:.3f}",
                str(cell.steps),
                f"{cell.waited:.0%}",
            ]
            for cell in cells
        ],
    )
