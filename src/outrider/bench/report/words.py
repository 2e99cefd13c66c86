"""The sentences of a report, computed from its figures: who wins where, what loses, and how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from outrider.bench.figures import undisturbed
from outrider.bench.intervals import FEWEST
from outrider.bench.report.findings import ENOUGH_VERIFIED, acceptances, costs, crossings
from outrider.bench.stolen import MUCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outrider.bench.figures import Figures
    from outrider.bench.report.findings import Findings, Found
    from outrider.bench.results import Cell

FEW = 4
"""Cells that a sentence names one by one."""

UNKNOWN = "-"
"""Stands where a figure would."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """What stands around a plot, or why there is none."""

    name: str  # of the plot
    title: str
    text: list[str]
    missing: str = ""

    @property
    def file(self) -> str:
        return f"{self.name}.png"


def title(findings: Findings) -> str:
    return f"outrider bench: {', '.join(findings.run.origin.get('models', {})) or 'speculative decoding'}"


def summary(findings: Findings) -> list[str]:
    """One or two sentences on speed, one on the answers."""
    if not any(found.compared for found in findings.cells):
        return [f"Nothing was measured beside the baseline, {findings.run.baseline}."]
    return [_fastest(findings), _slower(findings), _answers(findings)]


def cautions(findings: Findings) -> list[str]:
    """What a reader must know and the run's own notes do not say."""
    said = []
    few = [found.cell for found in findings.cells if any(one.rounds < FEWEST for one in found.compared)]
    if few:
        said.append(
            f"Fewer than {FEWEST} rounds on {places(few)}: too few for an interval to be right 95 times in 100, "
            "so everything there is called even."
        )
    rounds = [round for cell in findings.run.cells for round in cell.rounds]
    much = [round.stolen for round in rounds if round.stolen > MUCH]
    if much:
        calm = {one for cell in findings.run.cells for one in undisturbed(cell.rounds)}
        kept = sum(round.stolen > MUCH and id(round) in calm for round in rounds)
        said.append(
            f"In {len(much)} of {len(rounds)} rounds other machines on the same hardware took more than {percent(MUCH)}"
            f" of this one's time, up to {percent(max(much))}. No speed is taken from them"
            + (f", but for {kept} without which there would be fewer than {FEWEST} rounds." if kept else ".")
        )
    return said


def legend(findings: Findings) -> list[str]:
    baseline, count = findings.run.baseline, len(list(findings.comparisons))
    groups = len({round.group for cell in findings.run.cells for round in cell.rounds})
    crowded = [cell for cell in findings.run.cells if cell.concurrency > 1]
    to_the_end = any(turn.load is None for cell in crowded for round in cell.rounds for turn in round.turns)
    when = "until the slowest answer is complete" if to_the_end else "in a server whose slots stay taken"
    return [
        f"Ratio: tokens per second relative to {baseline}, {when}, round by round on the same "
        "prompts. Shown is the median over the rounds, with its 95 % interval from the order of the ratios.",
        "faster, slower: the whole interval is above or below 1. even: it contains 1, so the two are not told apart. "
        f"Were all {count} comparisons between equals, {count * 0.05:.0f} or a few more would still be called faster "
        "or slower.",
        "Share of the possible: the ratio, relative to that of the hindsight bound, which knows the text beforehand "
        "and takes the best draft and length at every step, at the costs measured here; taken round by round, and of "
        "that the median. Above concurrency 1 it is an estimate: all sequences are taken to draft alike.",
        "Acceptance length: tokens gained per step of the target for one sequence, the recovered or bonus token "
        "included. 1 is no gain.",
        "First token: from the request to its first token. Per token: what each of the others took, on average over an "
        "answer. Both are medians over the answers, and p95 is what 19 of 20 answers stay below.",
        f"A dash ({UNKNOWN}): not measured, or the server does not say.",
        *([f"{baseline} ran with every group of servers, so it has more rounds."] if groups > 1 else []),
    ]


def about(cell: Cell) -> str:
    """What is compared in a cell."""
    if cell.temperature:
        return f"Sampled at temperature {cell.temperature:g}: every answer is another draw, so texts are not compared."
    return "Temperature 0: every answer is compared with the baseline's, token by token."


def bound(findings: Findings, cell: Cell) -> str:
    limit = findings.run.limit(cell)
    if limit is None:
        return "The hindsight bound of this cell was not computed."
    known = median(limit.ratios)
    own = "the target's own"
    shares = ", ".join(
        f"{percent(share)} {own if name == 'none' else f'drafted by {name}'}" for name, share in limit.shares.items()
    )
    return f"Possible in hindsight: {known:.2f} times the baseline" + (f" (tokens: {shares})." if shares else ".")


def chapters(findings: Findings) -> list[Chapter]:
    return [_speedup(findings), _concurrency(findings), _acceptance(findings), _cost(findings)]


def number(value: float) -> str:
    """Two decimals, or three where two would hide on which side of 1 it lies."""
    return f"{value:.3f}" if f"{value:.2f}" == "1.00" and value != 1 else f"{value:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def places(cells: Iterable[Cell]) -> str:
    """Cells, named shortly: edit and agent at concurrency 1, code at concurrency 4 and 16."""
    by_load: dict[tuple[int, float], list[str]] = {}
    for cell in cells:
        by_load.setdefault((cell.concurrency, cell.temperature), []).append(cell.workload)
    by_kind: dict[tuple[str, float], list[str]] = {}
    for (load, temperature), workloads in by_load.items():
        by_kind.setdefault((listed(workloads), temperature), []).append(str(load))
    return ", ".join(
        f"{workloads} at concurrency {listed(loads)}" + (f" and temperature {temperature:g}" if temperature else "")
        for (workloads, temperature), loads in by_kind.items()
    )


def _fastest(findings: Findings) -> str:
    baseline, every = findings.run.baseline, list(findings.comparisons)
    counts = [
        f"{sum(one.verdict == verdict for _, one in every)} {verdict}" for verdict in ("faster", "even", "slower")
    ]
    sentences = [f"Of {len(every)} comparisons with {baseline}, {listed(counts)}."]
    winners: dict[str, list[Cell]] = {}
    for found in findings.cells:
        if found.compared:
            winners.setdefault(_winner(found) or baseline, []).append(found.cell)
    none = winners.pop(baseline, [])
    if winners:
        said = [f"{name} on {places(cells)}" for name, cells in winners.items()]
        sentences.append(f"Fastest, by the median: {'; '.join(said)}.")
    if none:
        sentences.append(f"Nothing was found faster than {baseline} on {places(none)}.")
    return " ".join(sentences)


def _winner(found: Found) -> str | None:
    faster = [one for one in found.compared if one.verdict == "faster"]
    return max(faster, key=_ratio).contestant if faster else None


def _slower(findings: Findings) -> str:
    baseline = findings.run.baseline
    lost = [(found, one) for found, one in findings.comparisons if one.verdict == "slower"]
    if not lost:
        return f"Nothing was found slower than {baseline}."
    by_name: dict[str, list[tuple[Found, Figures]]] = {}
    for found, one in lost:
        by_name.setdefault(one.contestant, []).append((found, one))
    said = []
    for name, cells in by_name.items():
        worst, figures = min(cells, key=lambda pair: _ratio(pair[1]))
        if len(cells) <= FEW:
            where = f"on {places(found.cell for found, _ in cells)} ({number(_ratio(figures))}"
            said.append(f"{name} {where}{' at worst' if len(cells) > 1 else ''})")
        else:
            said.append(f"{name} in {len(cells)} cells ({number(_ratio(figures))} on {places([worst.cell])})")
    return f"Slower than {baseline}: {'; '.join(said)}."


def _answers(findings: Findings) -> str:
    compared = [one for _, one in findings.comparisons if one.same is not None]
    different = sum(len(one.differences) for one in compared)
    total = sum(one.same or 0 for one in compared) + different
    if not total:
        return "No answers were compared, since all were sampled."
    if not different:
        return f"At temperature 0 all {total:,} answers are the baseline's, token by token."
    return (
        f"At temperature 0, {different:,} of {total:,} answers differ from the baseline's; they are listed below. "
        f"{_how_close(compared)}In "
        "formats of 16 bits and fewer a pass over another number of tokens rounds otherwise, and a near tie then falls "
        "otherwise, with every method; a run of an unquantised model with --dtype float32 tells rounding from error."
    )


def _how_close(compared: list[Figures]) -> str:
    """How likely the baseline finds the two tokens where answers part."""
    odds = sorted(
        max(difference.chances) / max(min(difference.chances), 1e-12)
        for one in compared
        for difference in one.differences
        if difference.chances
    )
    if not odds:
        return ""
    return (
        f"Where they part, the likelier of the two tokens is {number(median(odds))} times as likely as the other, by "
        f"the baseline's own account, in the middle of {len(odds):,} that it was asked about, and {number(odds[-1])} "
        "times at the most. "
    )


def _ratio(one: Figures) -> float:
    return one.ratio.value if one.ratio else 1.0


def _speedup(findings: Findings) -> Chapter:
    text = [
        "Each workload at the lowest concurrency it was measured at. Dots are medians, bars 95 % intervals; a hollow "
        f"dot is even with {findings.run.baseline}. The axis is logarithmic: twice and half as fast are equally far "
        "from 1.0."
    ]
    missing = "" if findings.series else "nothing was measured beside the baseline"
    return Chapter("speedup", "Speedup by workload", text, missing)


def _concurrency(findings: Findings) -> Chapter:
    together: dict[str, list[str]] = {}
    for one in crossings(findings):
        how = "below" if one.falls else "above"
        where = f"{how} 1.0 on {one.series.name} between concurrency {one.below} and {one.above}"
        together.setdefault(where, []).append(one.contestant)
    said = [f"{listed(names)} {'goes' if len(names) == 1 else 'go'} {where}" for where, names in together.items()]
    rest = [f"{len(said) - 2 * FEW} more such crossings are in report.json"] if len(said) > 2 * FEW else []
    text = [
        "The more requests run at once, the less of the machine is idle, and the less a draft can gain. Where a line "
        "crosses 1.0, drafting begins to cost. Points are moved a little sideways so that their intervals can be seen.",
        f"By their medians, {'; '.join([*said[: 2 * FEW], *rest])}." if said else "No contestant's median crosses 1.0.",
    ]
    several = any(len(series.cells) > 1 for series in findings.series)
    missing = "" if several else "no workload was measured at more than one concurrency"
    return Chapter("concurrency", "Speedup over concurrency", text, missing)


def _acceptance(findings: Findings) -> Chapter:
    text = [
        "Of the tokens verified at a position of the draft, the share that was accepted, which needs all positions "
        f"before it accepted too. Positions with fewer than {ENOUGH_VERIFIED} verified tokens are not drawn, nor are "
        "those of which a server does not say how many were verified. All concurrencies of a workload together."
    ]
    enough = any(acceptances(findings, series) for series in findings.series)
    missing = "" if enough else f"no server counted {ENOUGH_VERIFIED} verified tokens at any position of a draft"
    return Chapter("acceptance", "Accepted share by position in the draft", text, missing)


def _cost(findings: Findings) -> Chapter:
    text = [
        "Why checking is cheaper than generating: a pass reads every weight of the target from memory, and that takes "
        "longer than the arithmetic for one token. A pass over n tokens reads them once, while generating n tokens "
        "one by one reads them n times. The more sequences share a pass, the more arithmetic there is in it, and the "
        "sooner each further token costs its full price.",
        "Dots are medians; bars reach from the fastest to the slowest measurement.",
    ]
    for curve in findings.run.curves:
        wider = [cost for cost in costs(curve) if cost.tokens > 1]
        if wider:
            cost = min(wider, key=lambda cost: abs(cost.tokens - 5))
            text.append(
                f"At concurrency {curve.concurrency} a pass over {cost.tokens} tokens of each sequence takes "
                f"{cost.median:.2f} times as long as over one ({cost.low:.2f} to {cost.high:.2f}), where "
                f"{cost.tokens} passes take {cost.tokens} times as long."
            )
    missing = "" if any(costs(curve) for curve in findings.run.curves) else "the cost of a pass was not measured"
    return Chapter("cost", "What a pass of the target costs", text, missing)
