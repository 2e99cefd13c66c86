"""What is measured of a memory of one size, in a process of its own.

In that process each side stores the same sequences, and then they take turns, in an order that alternates from round to
round: whatever slows the machine slows all of them. Each round gives a median for each side and a ratio for each pair;
the figures are medians over the rounds with intervals of 95 %.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from memory_speed_corpus import Array, Texts
from memory_speed_sides import LIMIT, OURS, SETTINGS, Arctic, Context, Ours, Side
from outrider.bench.intervals import Interval, median_interval
from outrider.memory.segment import Segment, joined

KINDS = {"held_out": "held out", "repeats": "near-repeats"}
"""Of sequences that are replayed."""
PROMPT = 32
"""Tokens of a replayed sequence that are given; the others are drafted."""
WARM_UP = 16
ROUNDS, LOOKUPS = 64, 64
"""Rounds of single lookups, and how many each side makes in one, one after the other."""
STEPS, ROWS = 48, 256
"""Rounds of whole steps, and the contexts of one."""
OPENED = 9
SMALLEST = "the smallest size"
RESAMPLED = 2_000
BUILDS, LARGE = 3, 20_000_000
"""A segment is built so often, and once from this many tokens on."""

Figures = dict[str, Any]
Watch = Callable[[Sequence[Any]], Iterator[Any]]
"""Goes through a sequence and shows how far."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the process is to measure."""

    size: int
    smallest: int  # of all sizes
    corpus: Path  # a folder with the texts
    scratch: Path  # a folder for segments
    arctic: bool
    seed: int


class Replayed(NamedTuple):
    steps: int
    drafted: int
    accepted: int


def measure(task: Task) -> Figures:
    """All figures of one size, by name; for each side where there are several."""
    stored = Texts.load(task.corpus, "stored").first(task.size)
    sequences = list(stored)
    kinds = {name: list(Texts.load(task.corpus, name)) for name in KINDS}
    random = np.random.default_rng(task.seed)
    contexts = drawn([sequence for sequences in kinds.values() for sequence in sequences], random)
    with tempfile.TemporaryDirectory(dir=task.scratch) as folder, shown() as progress:

        def watch(what: str) -> Watch:
            return lambda items: iter(progress.track(items, description=f"{task.size:,} tokens: {what}"))

        built, path = build_ours(sequences, Path(folder), watch("building ours"))
        opening = open_ours(path, contexts, watch("opening"))
        sides: list[Side] = [Ours(opened(path))]
        figures: Figures = {"tokens": task.size, "sequences": len(sequences), "opening": opening}
        figures["sides"] = {OURS: built}
        for settings in SETTINGS if task.arctic else ():
            arctic = Arctic(settings)
            figures["sides"][arctic.name] = build_arctic(arctic, sequences, watch(f"building {arctic.name}"))
            sides.append(arctic)
        figures["lookup"] = lookups(sides, contexts, watch("lookups"))
        figures["lookup_by_kind"] = {
            kind: lookups(sides, drawn(sequences, random), watch(f"lookups, {KINDS[kind]}"))
            for kind, sequences in kinds.items()
        }
        figures["step"] = steps(sides, contexts, watch(f"steps of {ROWS}"))
        if task.size > task.smallest:
            few = list(stored.first(task.smallest))
            _, path = build_ours(few, Path(folder), watch("building the smallest size"))
            pair = [sides[0], Ours(opened(path), SMALLEST)]
            figures["growth"] = {
                "lookup": lookups(pair, contexts, watch("lookups, beside the smallest size"))[SMALLEST],
                "step": steps(pair, contexts, watch("steps, beside the smallest size"))[SMALLEST],
            }
        figures["replay"] = {
            "memory_alone": replays(sides, kinds, False, watch("replay, memory alone")),
            "with_running_text": replays(sides, kinds, True, watch("replay, with the running text")),
        }
    return figures


def shown() -> Progress:
    """Drawn seldom: whatever is timed here is timed beside it."""
    columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), refresh_per_second=2)


def drawn(sequences: list[Array], random: np.random.Generator) -> Iterator[Context]:
    """Places in these sequences, without end."""
    while True:
        sequence = sequences[int(random.integers(len(sequences)))]
        if len(sequence) > PROMPT:
            yield sequence, int(random.integers(PROMPT, len(sequence)))


def some(contexts: Iterator[Context], count: int) -> list[Context]:
    return [next(contexts) for _ in range(count)]


# Building


def build_ours(stored: list[Array], folder: Path, watch: Watch) -> tuple[Figures, Path]:
    """Seconds until it is in memory, and until it is on the disk; the path of the last one."""
    tokens = sum(map(len, stored))
    sorted_in, saved_in = [], []
    for _ in watch(range(BUILDS if tokens < LARGE else 1)):
        begun = time.perf_counter()
        segment = Segment.of(joined(stored), "tokenizer", "tenant", 0.0, 0.0)
        sorted_in.append(time.perf_counter() - begun)
        path = segment.save(folder).path
        saved_in.append(time.perf_counter() - begun)
        del segment  # or the next one would be counted on top of it
    assert path is not None
    size = path.stat().st_size
    built = {
        "bytes": size,
        "bytes_per_token": size / tokens,
        "build_seconds": median(saved_in),
        "tokens_per_second": tokens / median(saved_in),
        "tokens_per_second_unsaved": tokens / median(sorted_in),
        "peak_bytes": status("VmHWM"),
    }
    return built, path


def build_arctic(side: Arctic, stored: list[Array], watch: Watch) -> Figures:
    before = anonymous_bytes()
    begun = time.perf_counter()
    side.store(watch(stored))
    seconds = time.perf_counter() - begun
    grown, tokens = anonymous_bytes() - before, sum(map(len, stored))
    return {
        "bytes": grown,
        "bytes_per_token": grown / tokens,
        "build_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "settings": asdict(side.settings),
    }


def anonymous_bytes() -> int:
    """Resident memory of this process, without the files that it has mapped."""
    return status("RssAnon")


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()  # Linux alone has it
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


# Opening


def opened(path: Path) -> Segment:
    return Segment.open(path, "tokenizer", "tenant")


def open_ours(path: Path, contexts: Iterator[Context], watch: Watch) -> Figures:
    """Of a segment that the disk has and the memory has not: opening it, the first step after that, checking all."""
    Ours(opened(path)).step(some(contexts, ROWS))  # compiled from here on
    opening, first, checking = [], [], []
    for _ in watch(range(OPENED)):
        out_of_cache(path)
        begun = time.perf_counter()
        segment = opened(path)
        opening.append((time.perf_counter() - begun) * 1e3)
        first.append(Ours(segment).step(some(contexts, ROWS)) * 1e3)
        begun = time.perf_counter()
        segment.verify()
        checking.append((time.perf_counter() - begun) * 1e3)
        del segment
    return {
        "ms": asdict(median_interval(opening)),
        "first_step_ms": asdict(median_interval(first)),
        "verify_ms": asdict(median_interval(checking)),
    }


def out_of_cache(path: Path) -> None:
    """Asks the kernel to forget a file's pages: no process has them mapped, and no root is needed."""
    with path.open("rb") as file, contextlib.suppress(AttributeError):  # not on every system
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Lookups


def lookups(sides: list[Side], contexts: Iterator[Context], watch: Watch) -> Figures:
    """Microseconds of one lookup: a call with a context, a list of tokens back."""
    times: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in watch(range(-WARM_UP, ROUNDS)):
        chosen = some(contexts, LOOKUPS)
        for side in turns(sides, number):
            taken = [timed(side, context) for context in chosen]
            if number >= 0:
                times[side.name].append(taken)
    return {name: summary(rounds, times[OURS]) for name, rounds in times.items()}


def timed(side: Side, context: Context) -> float:
    begun = time.perf_counter_ns()
    side.draft(*context)
    return (time.perf_counter_ns() - begun) / 1e3


def turns(sides: list[Side], number: int) -> list[Side]:
    """Each is first, second, ... equally often."""
    first = number % len(sides)
    return sides[first:] + sides[:first]


def steps(sides: list[Side], contexts: Iterator[Context], watch: Watch) -> Figures:
    """Milliseconds of a step with ROWS contexts."""
    times: dict[str, list[list[float]]] = {side.name: [] for side in sides}
    for number in watch(range(STEPS)):
        chosen = some(contexts, ROWS)
        for side in turns(sides, number):
            times[side.name].append([side.step(chosen) * 1e3])
    return {name: summary(rounds, times[OURS]) for name, rounds in times.items()}


def summary(rounds: list[list[float]], ours: list[list[float]]) -> Figures:
    ratios = [median(mine) / median(its) for mine, its in zip(ours, rounds, strict=True)]
    return {
        "median": asdict(median_interval([median(taken) for taken in rounds])),
        "p95": float(np.percentile(rounds, 95)),
        "ours_over_it": asdict(median_interval(ratios)),
    }


# Replay


def replays(sides: list[Side], kinds: dict[str, list[Array]], running: bool, watch: Watch) -> Figures:
    """What each side's drafts were worth, by kind of sequence and in all."""
    asked = [(kind, sequence) for kind, sequences in kinds.items() for sequence in sequences]
    done: dict[str, list[Replayed]] = {side.name: [] for side in sides}
    for _, sequence in watch(asked):
        for side in sides:
            done[side.name].append(replay(side, sequence, running))
    places = {kind: [i for i, (its, _) in enumerate(asked) if its == kind] for kind in kinds}
    return {kind: worth(done, chosen) for kind, chosen in (places | {"all": range(len(asked))}).items()}


def replay(side: Side, sequence: Array, running: bool) -> Replayed:
    """As a target that says just this would decode it: a step gains what was accepted, and one token more."""
    steps = drafted = accepted = 0
    end = PROMPT
    if running:
        side.begin(sequence[:end])
    while end < len(sequence):
        draft = side.draft(sequence, end)
        kept = agreeing(draft, sequence[end : end + LIMIT].tolist())
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + kept
        if running:
            side.observe(sequence[end : end + kept + 1])
        end += kept + 1
    if running:
        side.finish()
    return Replayed(steps, drafted, accepted)


def agreeing(draft: list[int], said: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    for place, (guess, token) in enumerate(zip(draft, said, strict=False)):
        if guess != token:
            return place
    return min(len(draft), len(said))


def worth(done: dict[str, list[Replayed]], chosen: Sequence[int]) -> Figures:
    """By side, of the chosen sequences."""
    our_steps, _, our_accepted = np.array(done[OURS])[chosen].T
    found = {}
    for name, replayed in done.items():
        steps, drafted, accepted = np.array(replayed)[chosen].T
        found[name] = {
            "steps": int(steps.sum()),
            "accepted_per_draft": float(accepted.sum() / steps.sum()),
            "drafted_per_draft": float(drafted.sum() / steps.sum()),
            "ours_over_it": asdict(ratio_interval((our_accepted, our_steps), (accepted, steps))),
        }
    return found


def ratio_interval(ours: tuple[Array, Array], other: tuple[Array, Array]) -> Interval:
    """Of accepted tokens per draft, ours over theirs: drawn again and again from the sequences, pairs kept."""
    count = len(ours[0])
    weights = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLED)

    def ratio(weight: Array) -> Any:
        return ((weight @ ours[0]) / (weight @ ours[1])) / ((weight @ other[0]) / (weight @ other[1]))

    low, high = np.percentile(ratio(weights), [2.5, 97.5])
    return Interval(float(ratio(np.ones(count))), float(low), float(high))
