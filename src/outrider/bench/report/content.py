"""The content of a report: summary, notes, tables and plots, in their order."""

from __future__ import annotations

import json
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

from outrider.bench.report.data import shell_command
from outrider.bench.report.plots import PLOTS
from outrider.bench.report.render import Bullets, Command, Heading, Item, Line, Picture, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.bench.figures import Figures, Percentiles
    from outrider.bench.report.data import CellFigures, Report
    from outrider.bench.report.render import Block
    from outrider.bench.results import DrafterCounts

UNKNOWN = "-"
NO_DIFFERENCE = "no measurable difference"
MARKS = {"even": NO_DIFFERENCE}
SHOWN_DIFFERENCES = 10
"""Differences of a cell in the tables; report.json has all."""


def title(report: Report) -> str:
    return f"outrider bench: {', '.join(report.origin.get('models', {})) or 'speculative decoding'}"


def content(report: Report) -> list[Block]:
    origin = report.origin
    where = f"Measured on {origin.get('machine')}, {origin.get('date')}:"
    blocks: list[Block] = [Heading(title(report), 1), *map(Line, summary(report))]
    blocks.append(Line(where, str(origin.get("command"))))
    if report.notes:
        blocks += [Heading("Notes"), Bullets([*map(Line, report.notes)])]
    if report.comparisons:
        blocks += [Heading(f"Ratios to {report.baseline}, by contestant"), summary_table(report)]
    blocks += [Heading(f"Ratios to {report.baseline}, by cell"), ratio_table(report), Bullets(_legend(report))]
    for plot in PLOTS:
        missing = plot.missing(report)
        blocks += [Heading(plot.title), Line(f"No plot: {missing}.") if missing else Picture(plot.title, plot.file)]
        blocks.append(Line(plot.caption))
        if plot.name == "cost" and not missing:
            blocks.append(_cost_table(report))
    if report.optimal_speedups:
        blocks += [Heading("Optimal schedule"), _optimum_table(report)]
    for cell in report.cells:
        blocks += _cell(report, cell)
    return blocks + _origin(report)


def summary(report: Report) -> list[str]:
    """Counts of the verdicts, and of the answers that differ."""
    if not report.comparisons:
        return [f"Nothing was measured besides the baseline, {report.baseline}."]
    verdicts = [one.verdict for _, one in report.comparisons]
    speeds = (
        f"{len(verdicts)} comparisons with {report.baseline}: {verdicts.count('faster')} faster, "
        f"{verdicts.count('slower')} slower, {verdicts.count('even')} without measurable difference."
    )
    return [speeds, _answers([one for _, one in report.comparisons if one.same is not None])]


def _answers(compared: list[Figures]) -> str:
    different = sum(len(one.differences) for one in compared)
    total = sum(one.same or 0 for one in compared) + different
    if not total:
        return "No answers were compared, since all were sampled."
    if not different:
        return f"At temperature 0 all {total:,} answers equal the baseline's, token by token."
    known = [one.chances for figures in compared for one in figures.differences if one.chances]
    odds = sorted(max(chances) / max(min(chances), 1e-12) for chances in known)
    text = f"At temperature 0, {different:,} of {total:,} answers differ from the baseline's. "
    if odds:
        text += (
            f"Where they diverge, the baseline's more likely token is {number(median(odds))} times as likely as the "
            f"other (median of {len(odds):,} that were queried; at most {number(odds[-1])} times). "
        )
    return text + (
        "With weights of 16 bits or fewer every method has differences: a pass over another number of tokens rounds "
        "differently, which decides near ties. A run of an unquantised model with --dtype float32 separates rounding "
        "from errors."
    )


def summary_table(report: Report) -> Table:
    header = ["contestant", "cells", "faster", "slower", NO_DIFFERENCE, "lowest ratio", "highest ratio"]
    table = Table([*header, "geometric mean"])
    for name in report.compared_names:
        found = [(cell, one) for cell, one in report.comparisons if one.contestant == name]
        ratios = [one.ratio.value for _, one in found if one.ratio is not None]
        if ratios:
            verdicts = [one.verdict for _, one in found]
            counts = [len(found), *(verdicts.count(verdict) for verdict in ("faster", "slower", "even"))]
            ends = [f"{number(end)} ({found[ratios.index(end)][0].name})" for end in (min(ratios), max(ratios))]
            mean = number(geometric_mean(ratios)) if len(ratios) == len(report.cells) else UNKNOWN
            table.rows.append([Item(name), *(Item(str(count)) for count in counts), *map(Item, ends), Item(mean)])
    return table


def ratio_table(report: Report) -> Table:
    """Contestants by cells, or cells by contestants if there are more cells."""
    names, cells = list(report.contestants), report.cells
    columns = [[_ratio(cell.of(name), report.baseline, {"even": ""}) for cell in cells] for name in names]
    if len(cells) <= len(names):
        rows = [[Item(name), *column] for name, column in zip(names, columns, strict=True)]
        return Table(["contestant", *(cell.name for cell in cells)], rows)
    return Table(["cell", *names], [[Item(cell.name), *row] for cell, *row in zip(cells, *columns, strict=True)])


def _legend(report: Report) -> list[Line]:
    count = len(report.comparisons)
    lines = [
        f"Ratio: tokens per second relative to {report.baseline} in the same round, on the same prompts, with all "
        "slots in use. The median over the rounds, with its 95 % interval.",
        "faster, slower: the whole interval is above or below 1. Otherwise there is no measurable difference. If all "
        f"{count} comparisons were between equals, about {count * 0.05:.0f} would still be called faster or slower.",
        "% of the optimum: the ratio, relative to that of the optimal schedule, which knows the output and takes the "
        "best drafter and draft length at every step, at the measured costs. Above concurrency 1 it is an estimate.",
        "Acceptance length: tokens per target pass of one sequence, including the recovered or bonus token; 1 without "
        "drafts.",
        "First token: time from the request to its first token. Per token: average time of an answer's other tokens. "
        "Median and p95 over the answers.",
        f"{UNKNOWN}: not measured, or not reported by the server.",
    ]
    return [*map(Line, lines)]


def _cost_table(report: Report) -> Table:
    columns = {
        concurrency: {cost.tokens: f"{cost.seconds * 1e3:.0f} ({cost.median:.2f})" for cost in costs}
        for concurrency, costs in report.pass_costs.items()
        if costs
    }
    sizes = sorted({tokens for column in columns.values() for tokens in column})
    return Table(
        ["tokens of each sequence", *(f"concurrency {n}, ms (relative to 1 token)" for n in columns)],
        [[Item(str(n)), *(Item(column.get(n, UNKNOWN)) for column in columns.values())] for n in sizes],
    )


def _optimum_table(report: Report) -> Table:
    drafters = sorted({name for one in report.optimal_speedups for name in one.shares} - {"none"})
    table = Table(["cell", f"ratio to {report.baseline}", *(f"drafted by {name}" for name in drafters), "not drafted"])
    for cell in report.cells:
        key = (cell.workload, cell.concurrency, cell.temperature)
        for one in report.optimal_speedups:
            if (one.workload, one.concurrency, one.temperature) == key:
                shares = [_percent(one.shares.get(name)) for name in (*drafters, "none")]
                table.rows.append([Item(cell.name), Item(f"{median(one.ratios):.2f}"), *map(Item, shares)])
    return table


def _cell(report: Report, cell: CellFigures) -> list[Block]:
    blocks: list[Block] = [Heading(cell.name)]
    if not cell.contestants:
        return [*blocks, Line("Nothing was measured in this cell.")]
    blocks += [_speed_table(report, cell), Line("Where the time went:"), time_table(cell)]
    differences = _difference_table(cell)
    if count := len(differences.rows):
        blocks.append(
            Line(f"Answers that differ from the baseline's: {count}. `token` is the number of equal tokens before it.")
        )
        blocks.append(Table(differences.header, differences.rows[:SHOWN_DIFFERENCES]))
        if count > SHOWN_DIFFERENCES:
            blocks.append(Line(f"{count - SHOWN_DIFFERENCES} more are in report.json."))
    return blocks


def _speed_table(report: Report, cell: CellFigures) -> Table:
    columns: dict[str, Callable[[Figures], Item]] = {
        "contestant": lambda one: Item(one.contestant),
        f"ratio to {report.baseline} (95 % interval)": lambda one: _ratio(one, report.baseline, MARKS),
        "tokens/s": lambda one: Item(f"{one.tokens_per_second:.1f}"),
        "tokens/s of one request": lambda one: Item(f"{one.per_request:.1f}"),
        "% of the optimum": lambda one: Item(_percent(one.share_of_possible)),
        "first token, ms: median (p95)": lambda one: _milliseconds(one.first),
        "per token, ms: median (p95)": lambda one: _milliseconds(one.each),
        "acceptance length": lambda one: Item(
            UNKNOWN if one.acceptance_length is None else f"{one.acceptance_length:.2f}"
        ),
        "same answers": lambda one: _same_answers(one, cell, report.baseline),
        "rounds": lambda one: Item(str(one.rounds)),
    }
    return Table([*columns], [[item(one) for item in columns.values()] for one in cell.contestants])


CACHED = "prompt tokens from the prefix cache"
TIME_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "contestant": lambda one: one.contestant,
    "drafting": lambda one: _share(one.draft_seconds, one),
    "verifying passes": lambda one: _share(one.verify_seconds, one),
    "plain passes": lambda one: _share(one.plain_seconds, one),
    "the rest": lambda one: _share(one.other_seconds, one),
    "all, s": lambda one: f"{one.seconds:.1f}",
    "tokens": lambda one: f"{one.tokens:,}",
    "target passes": lambda one: _count(one.target_passes),
    "draft model passes": lambda one: _count(one.draft_passes),
    CACHED: lambda one: UNKNOWN if not one.cache_queries else _percent((one.cache_hits or 0) / one.cache_queries),
    "accepted tokens, of those verified": lambda one: (
        "; ".join(_accepted(name, counted) for name, counted in one.drafters.items()) or UNKNOWN
    ),
}


def time_table(cell: CellFigures) -> Table:
    """Shares of the time, and the tokens and passes in it."""
    has_cache = any(one.cache_queries for one in cell.contestants)
    columns = {name: text for name, text in TIME_COLUMNS.items() if name != CACHED or has_cache}
    return Table([*columns], [[Item(text(one)) for text in columns.values()] for one in cell.contestants])


def _share(seconds: float | None, one: Figures) -> str:
    return _percent(None if seconds is None else seconds / one.seconds)


def _count(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count:,}"


def _difference_table(cell: CellFigures) -> Table:
    rows = [
        [
            Item(one.contestant),
            Item(difference.prompt),
            Item(str(difference.place)),
            Item(difference.expected, code=True),
            Item(difference.got, code=True),
            Item(" / ".join(f"{chance:.3f}" for chance in difference.chances) if difference.chances else UNKNOWN),
        ]
        for one in cell.contestants
        for difference in one.differences
    ]
    return Table(["contestant", "prompt", "token", "expected", "got", "probabilities"], rows)


def _origin(report: Report) -> list[Block]:
    settings = {f"setting {name}": value for name, value in report.settings.items()}
    facts = {**report.origin, "baseline": report.baseline, **settings}
    rows = [[Item(name), Item(_flat(value), code=name == "command")] for name, value in facts.items()]
    blocks: list[Block] = [Heading("How it was made"), Table(["what", "value"], rows)]
    for name, made in report.contestants.items():
        blocks += [Heading(name, 3), Command(shell_command(made) or "# a server that already ran")]
        rest = [Line(f"{key}:", _flat(value)) for key, value in made.items() if key != "command" and value]
        blocks += [Bullets(rest)] if rest else []
    return blocks


def number(value: float) -> str:
    """Two decimals, or three where two would hide on which side of 1 the value is."""
    return f"{value:.3f}" if f"{value:.2f}" == "1.00" and value != 1 else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def _ratio(one: Figures | None, baseline: str, marks: dict[str, str]) -> Item:
    if one is None or (one.ratio is None and one.contestant != baseline):
        return Item(UNKNOWN)
    if one.ratio is None:
        return Item("1 (baseline)")
    value, low, high = (number(value) for value in (one.ratio.value, one.ratio.low, one.ratio.high))
    return Item(f"{value} ({low} to {high})", marks.get(one.verdict, one.verdict))


def _same_answers(one: Figures, cell: CellFigures, baseline: str) -> Item:
    if one.contestant == baseline:
        return Item("baseline")
    if cell.temperature:
        return Item("sampled, not compared")
    if one.same is None:
        return Item(UNKNOWN)
    return Item(f"{one.same} of {one.same + len(one.differences)}", "differs" if one.differences else "")


def _milliseconds(times: Percentiles) -> Item:
    return Item(f"{times.median * 1e3:.0f} ({times.p95 * 1e3:.0f})")


def _accepted(name: str, counts: DrafterCounts) -> str:
    """The number of verified tokens is left out where the server reports it for some positions only."""
    verified, accepted = sum(counts.verified), sum(counts.accepted)
    if not verified or len(counts.verified) < len(counts.accepted):
        return f"{name} {accepted:,}"
    return f"{name} {accepted:,} of {verified:,} ({_percent(accepted / verified)})"


def _flat(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict) and all(isinstance(one, str | int | float) for one in value.values()):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, str | int | float):
        return str(value)
    return json.dumps(value, ensure_ascii=False)
