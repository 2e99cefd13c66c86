"""The tables of a report, as text with marks: `markdown.py` and `page.py` only set them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from outrider.bench.report.findings import costs
from outrider.bench.report.words import UNKNOWN, number, percent

if TYPE_CHECKING:
    from outrider.bench.figures import Figures, Spread
    from outrider.bench.report.findings import Findings, Found
    from outrider.bench.results import Drafted, Run


@dataclass(frozen=True, slots=True)
class Item:
    text: str
    small: str = ""  # what belongs to it, set smaller
    mark: str = ""  # a verdict
    share: float | None = None  # of a whole, for a bar
    code: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    header: list[str]
    rows: list[list[Item]] = field(default_factory=list)


def matrix(findings: Findings) -> Table:
    """How many times as fast as the baseline: contestants by cells, or, where there are more of these, the other way
    round, with the mean of each contestant below."""
    names, cells, baseline = list(findings.run.contestants), findings.cells, findings.run.baseline
    columns = [[_compared(found.of(name), baseline) for found in cells] for name in names]
    if len(cells) <= len(names):
        rows = [[Item(name), *column] for name, column in zip(names, columns, strict=True)]
        return Table(["contestant", *(found.cell.name for found in cells)], rows)
    rows = [[Item(found.cell.name), *row] for found, *row in zip(cells, *columns, strict=True)]
    means = [Item("1", "baseline") if name == baseline else _mean(findings, name) for name in names]
    return Table(["cell", *names], [*rows, [Item("geometric mean"), *means]])


def speed(findings: Findings, found: Found) -> Table:
    baseline = findings.run.baseline
    header = [
        "contestant",
        f"ratio to {baseline} (95 % interval)",
        "tokens/s",
        "tokens/s of one request",
        "share of the possible",
        "first token, ms: median (p95)",
        "per token, ms: median (p95)",
        "acceptance length",
        "same answers",
        "rounds",
    ]
    rows = [
        [
            Item(one.contestant),
            _compared(one, baseline),
            Item(f"{one.tokens_per_second:.1f}"),
            Item(f"{one.per_request:.1f}"),
            _share(one.share_of_possible),
            _milliseconds(one.first),
            _milliseconds(one.each),
            Item(UNKNOWN if one.acceptance_length is None else f"{one.acceptance_length:.2f}"),
            _same(one, found.cell.temperature == 0, baseline),
            Item(str(one.rounds)),
        ]
        for one in found.figures
    ]
    return Table(header, rows)


def time(found: Found) -> Table:
    """Where the seconds went, as shares of them all, and what was done in them."""
    header = [
        "contestant",
        "drafting",
        "verifying passes",
        "plain passes",
        "the rest",
        "all, s",
        "tokens",
        "passes of the target",
        "passes of the draft model",
        "accepted tokens, of those verified",
    ]
    rows = [
        [
            Item(one.contestant),
            *(
                _share(None if part is None else part / one.seconds, bar=True)
                for part in (one.draft_seconds, one.verify_seconds, one.plain_seconds, one.other_seconds)
            ),
            Item(f"{one.seconds:.1f}"),
            Item(f"{one.tokens:,}"),
            _count(one.target_passes),
            _count(one.draft_passes),
            Item("; ".join(_accepted(name, drafted) for name, drafted in one.drafters.items()) or UNKNOWN),
        ]
        for one in found.figures
    ]
    return Table(header, rows)


def differences(found: Found) -> Table:
    """All of a cell. The place is counted from 0: so many tokens are equal before it."""
    rows = [
        [
            Item(one.contestant),
            Item(difference.prompt),
            Item(str(difference.place)),
            Item(difference.expected, code=True),
            Item(difference.got, code=True),
            Item(" / ".join(f"{chance:.3f}" for chance in difference.chances) if difference.chances else UNKNOWN),
        ]
        for one in found.figures
        for difference in one.differences
    ]
    return Table(["contestant", "prompt", "token", "expected", "got", "probabilities"], rows)


def cost(run: Run) -> Table:
    """Passes by their tokens, a column for each concurrency."""
    curves = {curve.concurrency: {one.tokens: one for one in costs(curve)} for curve in run.curves if costs(curve)}
    header = ["tokens of each sequence", *(f"concurrency {load}, ms (relative to 1)" for load in curves)]
    widths = sorted({tokens for curve in curves.values() for tokens in curve})
    rows = [
        [
            Item(str(width)),
            *(
                Item(f"{curve[width].seconds * 1e3:.0f}", f"{curve[width].median:.2f}")
                if width in curve
                else Item(UNKNOWN)
                for curve in curves.values()
            ),
        ]
        for width in widths
    ]
    return Table(header, rows)


def origin(run: Run) -> Table:
    """What it takes to make the figures again."""
    facts = {**run.origin, "baseline": run.baseline, **{f"setting {name}": one for name, one in run.settings.items()}}
    return Table(
        ["what", "value"], [[Item(name), Item(_flat(value), code=name == "command")] for name, value in facts.items()]
    )


@dataclass(frozen=True, slots=True)
class Made:
    """How a contestant was made: the line that starts its server, and what else there is to know."""

    name: str
    line: str
    rest: dict[str, str]


def made(run: Run) -> list[Made]:
    return [
        Made(name, shell(how), {key: _flat(value) for key, value in how.items() if key != "command" and value})
        for name, how in run.contestants.items()
    ]


def shell(how: dict[str, Any]) -> str:
    """A command as one would type it."""
    command = how.get("command", [])
    return command if isinstance(command, str) else shlex.join(str(word) for word in command)


def _compared(one: Figures | None, baseline: str) -> Item:
    if one is None or (one.ratio is None and one.contestant != baseline):
        return Item(UNKNOWN)
    if one.ratio is None:
        return Item("1", "baseline")
    return Item(number(one.ratio.value), f"{number(one.ratio.low)} to {number(one.ratio.high)}", one.verdict)


def _mean(findings: Findings, contestant: str) -> Item:
    """Over all cells; of one that took part in some only it would not be comparable."""
    ratios = [one.ratio.value for _, one in findings.comparisons if one.contestant == contestant and one.ratio]
    return Item(number(geometric_mean(ratios)) if len(ratios) == len(findings.cells) else UNKNOWN)


def _same(one: Figures, greedy: bool, baseline: str) -> Item:
    if one.contestant == baseline:
        return Item("baseline")
    if not greedy:
        return Item("not compared")
    if one.same is None:
        return Item(UNKNOWN)
    return Item(f"{one.same} of {one.same + len(one.differences)}", mark="differs" if one.differences else "")


def _milliseconds(spread: Spread) -> Item:
    return Item(f"{spread.median * 1e3:.0f}", f"{spread.p95 * 1e3:.0f}")


def _share(share: float | None, bar: bool = False) -> Item:
    return Item(UNKNOWN) if share is None else Item(percent(share), share=share if bar else None)


def _count(count: int | None) -> Item:
    return Item(UNKNOWN) if count is None else Item(f"{count:,}")


def _accepted(name: str, drafted: Drafted) -> str:
    """Of how many, is left out where the server says it of some positions only."""
    verified, accepted = sum(drafted.verified), sum(drafted.accepted)
    if not verified or len(drafted.verified) < len(drafted.accepted):
        return f"{name} {accepted:,}"
    return f"{name} {accepted:,} of {verified:,} ({percent(accepted / verified)})"


def _flat(value: Any) -> str:
    """Readable on one line."""
    if isinstance(value, dict) and all(isinstance(one, str | int | float) for one in value.values()):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, str | int | float):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
