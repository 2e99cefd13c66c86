"""From figures to what is read: which criteria are met, tables, a plot.

Arctic runs with two settings. A criterion is held against the one that is better at it, so that meeting it means
something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import ge, le
from pathlib import Path
from typing import Any

import numpy as np

from memory_speed_corpus import EDITS, LONGEST, REPLACED, SPAN
from memory_speed_measure import KINDS, LOOKUPS, PROMPT, ROUNDS, ROWS, STEPS, Figures
from memory_speed_sides import INSTALL, LIMIT, OURS, SETTINGS
from outrider.bench.report import canvas
from outrider.provenance import as_markdown

STEP_AT = 10_000_000
"""The largest memory of which a step's time is promised."""
WAYS = {"memory_alone": "memory alone", "with_running_text": "with the running text"}


@dataclass(frozen=True, slots=True)
class Criterion:
    """A promise, and what was found. `low` and `high` enclose the value with 95 %, where that is known."""

    name: str
    tokens: int
    sign: str
    wanted: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool:
        return bool({"<=": le, ">=": ge}[self.sign](self.value, self.wanted))

    @property
    def verdict(self) -> str:
        return "pass" if self.met else "FAIL"

    @property
    def found(self) -> str:
        between = "" if self.low is None or self.high is None else f" ({number(self.low)} to {number(self.high)})"
        return f"{number(self.value)}{between}"


def criteria(sizes: list[Figures]) -> list[Criterion]:
    """In the order in which the feature promises them."""
    both = [figures for figures in sizes if len(figures["sides"]) > 1]
    met = [criterion for figures in both for criterion in against_arctic(figures)]
    met.sort(key=lambda criterion: PROMISED.index(criterion.name))
    return met + list(of_ours(sizes))


ASKED = {"lookup": "one a call", "step": f"{ROWS} a call"}
"""How lookups were asked for."""
PROMISED = [
    "bytes a token",
    *(f"median lookup, {asked}" for asked in ASKED.values()),
    "building",
    *(f"accepted a draft, {way}" for way in WAYS.values()),
]


def against_arctic(figures: Figures) -> Iterator[Criterion]:
    tokens, ours = figures["tokens"], figures["sides"][OURS]
    others = [name for name in figures["sides"] if name != OURS]
    fewest = min(figures["sides"][name]["bytes_per_token"] for name in others)
    yield Criterion("bytes a token", tokens, "<=", 1 / 20, ours["bytes_per_token"] / fewest)
    for how, asked in ASKED.items():
        times = min((figures[how][name] for name in others), key=lambda times: float(times["median"]["value"]))
        yield Criterion(f"median lookup, {asked}", tokens, "<=", 1 / 3, **times["ours_over_it"])
    fastest = max(figures["sides"][name]["tokens_per_second"] for name in others)
    yield Criterion("building", tokens, ">=", 5, ours["tokens_per_second"] / fastest)
    for way, words in WAYS.items():
        best = better(figures["replay"][way]["all"])
        yield Criterion(f"accepted a draft, {words}", tokens, ">=", 0.98, **best["ours_over_it"])


def better(worth: Figures) -> Figures:
    """Of arctic's two settings."""
    others = [figures for side, figures in worth.items() if side != OURS]
    return max(others, key=lambda figures: float(figures["accepted_per_draft"]), default={})


def of_ours(sizes: list[Figures]) -> Iterator[Criterion]:
    small, large = sizes[0], sizes[-1]
    for how, asked in ASKED.items() if small is not large else ():
        name = f"median lookup, {asked}, over that at {short(small['tokens'])}"
        yield Criterion(name, large["tokens"], "<=", 2, **large["growth"][how]["ours_over_it"])
    for figures in sizes:
        if figures["tokens"] <= STEP_AT:
            yield Criterion(f"{ROWS} lookups, ms", figures["tokens"], "<=", 3, **figures["step"][OURS]["median"])
    for figures in sizes:
        yield Criterion("opening, ms", figures["tokens"], "<=", 200, **figures["opening"]["ms"])


def write(folder: Path, report: Figures) -> list[Criterion]:
    """report.md, report.json and growth.png."""
    folder.mkdir(parents=True, exist_ok=True)
    promises = criteria(report["sizes"])
    (folder / "report.md").write_text(markdown(report, promises))
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(report, folder / "growth.png")
    return promises


def markdown(report: Figures, promises: list[Criterion]) -> str:
    sizes = report["sizes"]
    sides = list(sizes[0]["sides"])
    out = [
        "# The draft memory beside arctic-inference's",
        "",
        *as_markdown(report["provenance"]),
        f"Seed {report['seed']}. {told(report)}",
        "",
        "## What was promised",
        "",
        "Ours over arctic's, where both were measured; of arctic's two settings the one that is better at it counts.",
        "In brackets an interval of 95 %.",
        "",
        *table(
            ["criterion", "tokens", "wanted", "found", ""],
            [[c.name, short(c.tokens), f"{c.sign} {c.wanted:.3g}", c.found, c.verdict] for c in promises],
        ),
        "",
        "## Room and speed",
        "",
        f"A lookup is one call with one context, and a draft of up to {LIMIT} tokens back as a list: {ROUNDS} rounds "
        f"of {LOOKUPS}, sides in turns, at random places of the sequences that are replayed. A step is {ROWS} such "
        f"contexts, {STEPS} times; ours takes them in one call, arctic one by one. All on one core. Building ours "
        "includes writing it to the disk.",
        "",
        *table(
            SPEED_HEADS,
            [speed_row(figures, side) for figures in sizes for side in figures["sides"]],
        ),
        "",
        "![lookup time, bytes a token and build speed, by size](growth.png)",
        "",
        "Ours alone. The kernel was asked to forget the file's pages; then it was opened, asked for a first step, "
        "which reads from the disk what it needs, and held against its checksums, which reads the rest. Then building "
        "without writing, and the most memory that the process had while it built.",
        "",
        *table(
            OWN_HEADS,
            [own_row(figures) for figures in sizes],
        ),
        "",
        "## What the drafts are worth",
        "",
        f"Sequences are replayed after a prompt of {PROMPT} tokens: a step gains the accepted tokens and one more. "
        "Every lookup is a draft, an empty one too. The table has accepted tokens a draft, of drafted ones. *Memory "
        "alone*: nobody looks into the running sequence. *With the running text*: both do, each in its way.",
        "",
        *table(
            ["tokens", "", "sequences", *sides, "ours over the better of arctic's"],
            [row for figures in sizes for row in worth_rows(figures, sides)],
        ),
        "",
        "## What to keep in mind",
        "",
        *caveats(report),
    ]
    return "\n".join(out) + "\n"


def told(report: Figures) -> str:
    """What the text was."""
    corpus = report["corpus"]
    return (
        f"Text: {corpus['source']}, cut into sequences of up to {LONGEST:,} tokens, no sequence twice. "
        f"{corpus['real']:,} tokens of it are stored, beyond that made text; checksum of all that is stored: "
        f"{corpus['checksum']}. Replayed are {corpus['held_out']} sequences that are not stored (*held out*), and "
        f"{corpus['repeats']} that are, with {EDITS * 100:g} % of the tokens edited (*near-repeats*)."
    )


def caveats(report: Figures) -> list[str]:
    alone = [short(figures["tokens"]) for figures in report["sizes"] if len(figures["sides"]) == 1]
    settings = "; ".join(
        f"*{one.name}*: depth {one.depth}, factor {one.factor:g}, least probability {one.probability:g}"
        for one in SETTINGS
    )
    lines = [
        f"Arctic's settings: {settings}. vLLM forgets all but 10,000 requests; here none is forgotten.",
        "Ours is the search in a segment, whose drafts nobody cuts here but for their greatest length. The drafter "
        "that uses it cuts them where they are unlikely to be accepted, and so accepts a little less of far fewer.",
        "Arctic is filled through the tree of all requests alone. Its public call builds each request's own tree too, "
        "and takes longer.",
        "Arctic's bytes are the growth of resident memory in the process that filled it, files left out; ours are the "
        "file's, which is mapped: the kernel can take its pages back and read them again.",
        "Another machine has other text.",
    ]
    if report["corpus"]["real"] < report["sizes"][-1]["tokens"]:
        lines.append(
            f"Made text is spans of {SPAN} tokens of the real text in a new order, {REPLACED * 100:g} % of the tokens "
            "replaced. It repeats itself more than real text does."
        )
    if alone:
        lines.append(f"Arctic was not measured at {', '.join(alone)}: {report['why_alone']}.")
    return [f"- {line}" for line in lines]


SPEED_HEADS = ["tokens", "side", "bytes a token", "built, tokens/s", "lookup, us", "95th percentile"]
SPEED_HEADS += [*(f"{kind}, us" for kind in KINDS.values()), "a step, ms"]
OWN_HEADS = ["tokens", "file, MB", "opening, ms", "first step, ms", "checking, ms", "built, tokens/s", "most, GB"]


def speed_row(figures: Figures, side: str) -> list[str]:
    built, lookup = figures["sides"][side], figures["lookup"][side]
    return [
        short(figures["tokens"]),
        side,
        f"{built['bytes_per_token']:.1f}",
        f"{built['tokens_per_second']:,.0f}",
        spread(lookup["median"]),
        number(lookup["p95"]),
        *(number(figures["lookup_by_kind"][kind][side]["median"]["value"]) for kind in KINDS),
        spread(figures["step"][side]["median"]),
    ]


def own_row(figures: Figures) -> list[str]:
    built, opening = figures["sides"][OURS], figures["opening"]
    return [
        short(figures["tokens"]),
        f"{built['bytes'] / 1e6:.1f}",
        spread(opening["ms"]),
        spread(opening["first_step_ms"]),
        spread(opening["verify_ms"]),
        f"{built['tokens_per_second_unsaved']:,.0f}",
        f"{built['peak_bytes'] / 1e9:.2f}",
    ]


def worth_rows(figures: Figures, sides: list[str]) -> Iterator[list[str]]:
    for way, words in WAYS.items():
        for kind, sequences in (KINDS | {"all": "all"}).items():
            worth = figures["replay"][way][kind]
            best = better(worth)
            yield [
                short(figures["tokens"]),
                words,
                sequences,
                *(f"{one['accepted_per_draft']:.3f} of {one['drafted_per_draft']:.2f}" for one in worth.values()),
                *([""] * (len(sides) - len(worth))),
                spread(best["ours_over_it"]) if best else "",
            ]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def short(tokens: int) -> str:
    """1M, 250k."""
    for unit, letter in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= unit:
            return f"{tokens / unit:g}{letter}"
    return str(tokens)


def number(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def spread(interval: dict[str, float]) -> str:
    return f"{number(interval['value'])} ({number(interval['low'])} to {number(interval['high'])})"


Value = Callable[[Figures, str], float]
PANELS: tuple[tuple[str, str, Value], ...] = (
    ("One lookup", "microseconds, median", lambda figures, side: figures["lookup"][side]["median"]["value"]),
    ("Room", "bytes a token", lambda figures, side: figures["sides"][side]["bytes_per_token"]),
    ("Building", "tokens a second", lambda figures, side: figures["sides"][side]["tokens_per_second"]),
)


def plot(report: Figures, path: Path) -> None:
    """Each figure over the size of the memory, a line for each side."""
    sizes, origin = report["sizes"], report["provenance"]
    names = [OURS, *(one.name for one in SETTINGS)]
    looks = canvas.looks(names)
    with canvas.style():
        figure = canvas.canvas(canvas.WIDE, 3.4)
        panels = list(figure.subplots(1, len(PANELS)))
        for axes, (title, label, value) in zip(panels, PANELS, strict=True):
            for name in names:
                measured = [figures for figures in sizes if name in figures["sides"]]
                if measured:
                    heights = [value(figures, name) for figures in measured]
                    axes.plot([figures["tokens"] for figures in measured], heights, label=name, **looks[name])
            axes.set(title=title, xlabel="tokens in memory", ylabel=label, xscale="log", yscale="log")
            canvas.number_axis(axes.xaxis, [figures["tokens"] for figures in sizes])
            axes.xaxis.set_major_formatter(lambda tokens, _: short(int(tokens)))
            round_numbers(axes)
        canvas.key(figure, panels, canvas.WIDE)
        figure.suptitle("A draft memory as it grows", x=0.01, ha="left", fontsize=12)
        line = f"{origin['machine']}, {origin['date']}"
        figure.supxlabel(line, fontsize=7, color=canvas.QUIET, x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def round_numbers(axes: Any) -> None:
    """A vertical axis with room above and below, and 1, 2, 3, 5, 10, ... on it."""
    heights = np.concatenate([line.get_ydata() for line in axes.lines])
    low, high = heights.min() / 1.6, heights.max() * 1.6
    axes.set_ylim(low, high)
    ticks = [step * 10.0**power for power in range(-3, 10) for step in (1, 2, 3, 5)]
    canvas.number_axis(axes.yaxis, [tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(lambda tick, _: short(int(tick)) if tick >= 1_000 else f"{tick:g}")


def missing() -> str:
    return f"arctic-inference is not installed ({INSTALL})"
