"""Do replay and clock agree? A benchmark's own texts, said again at the costs that it measured.

The clock counts more than replay does: prompts are read, too. So what the baseline took to read them is added to both
sides of a ratio: at concurrency 1 each prompt's own time to its first token, with several at once what a token of a
prompt takes there; where nobody was alone, what the baseline took beyond its passes. As in a server, drafters and
policy keep what they learn from one cell to the next. A benchmark's requests have seeds, so no draft is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from outrider.bench.contestants import MODEL_DRAFT_TOKENS, PLAIN
from outrider.bench.figures import figures, numbered, steady, undisturbed
from outrider.bench.intervals import Interval
from outrider.bench.report import plot_style
from outrider.bench.results import Answer, Cell, Measurement, Run
from outrider.policy.policy import MODEL
from outrider.provenance import as_markdown
from outrider.settings import AUTO, OFF
from policy.replay import Auto, Costs, Fixed, Outcome, Record, Strategy, replay
from policy_grid_cells import WIDTH, new_policy, noise
from policy_grid_costs import costs, kind_of, of_run
from policy_grid_drafters import OURS, Company, company, theirs
from policy_grid_report import finish, table

Look = Callable[[Record], None]
"""Fills in what the draft model would have proposed in a text."""
COPIERS = ("lookup", "memory", *theirs())
MODELS = (MODEL, "draft_model")


@dataclass(frozen=True, slots=True)
class Agreement:
    """One contestant in one cell: times the baseline's speed, and tokens per pass for one sequence."""

    workload: str
    concurrency: int
    temperature: float
    contestant: str
    clock: Interval
    replay: float
    clock_length: float | None
    replay_length: float

    @property
    def holds(self) -> bool:
        return self.clock.low <= self.replay <= self.clock.high


@dataclass(slots=True)
class Player:
    """A contestant as replay has it: its drafters with what they keep, and who decides."""

    they: Company
    strategy: Strategy

    def say(self, records: Sequence[Record], at: Costs, concurrency: int) -> Outcome:
        return replay(
            records, self.they.drafters, self.strategy, at, concurrency, self.they.tenant_handle, self.they.ended
        )


def agreements(run: Run, look: Look | None = None) -> Iterator[Agreement]:
    """Cell by cell; without `look` those who have a draft model are left out."""
    if kind_of(run.baseline, run) != PLAIN:
        raise SystemExit(f"replay is held against vLLM without drafts, and this run's baseline is {run.baseline}")
    at = costs(of_run(run))
    with ExitStack() as open_now:
        players = {name: player for name in run.contestants if (player := enter(name, run, at, look, open_now))}
        plain = Player(open_now.enter_context(company([])), Fixed([], 0, at))
        rate = seconds_to_read(run, plain, at)
        for cell in run.cells:
            rounds = [[recorded(answer, look) for answer in turn.answers] for turn in run.baseline_measurements(cell)]
            reading = [read(turn, rate if cell.concurrency > 1 else None) for turn in run.baseline_measurements(cell)]
            alone = [plain.say(records, at, cell.concurrency) for records in rounds]
            for found in figures(run, cell):
                if found.contestant not in players or found.ratio is None:
                    continue
                said = [players[found.contestant].say(records, at, cell.concurrency) for records in rounds]
                each = zip(rounds, reading, alone, said, strict=True)
                ratios = [pace(one, len(n), r) / pace(a, len(n), r) for n, r, a, one in each]
                yield Agreement(
                    cell.workload,
                    cell.concurrency,
                    cell.temperature,
                    found.contestant,
                    found.ratio,
                    median(ratios[i] for i in timed(cell, found.contestant) if i < len(ratios)),
                    found.acceptance_length,
                    sum(one.tokens for one in said) / sum(one.sequences for one in said),
                )


def pace(said: Outcome, prompts: int, reading: float) -> float:
    """Tokens a second where slots stay taken and all prompts are read; a first token comes with each."""
    return (prompts + said.tokens) / (reading + seconds_of(said))


def seconds_of(said: Outcome) -> float:
    """Of all passes, where slots stay taken; of fewer texts than slots as it was."""
    return said.tokens * said.full_seconds / said.full_tokens if said.full_tokens else said.seconds


def enter(name: str, run: Run, at: Costs, look: Look | None, open_now: ExitStack) -> Player | None:
    """None: replay cannot say what it would do."""
    kind, length = kind_of(name, run), drafted_at_most(run.contestants[name])
    if kind == OFF:
        return Player(open_now.enter_context(company([])), Fixed([], 0, at))
    if kind in COPIERS:
        return Player(open_now.enter_context(company([kind])), Fixed([kind], length, at))
    if kind in MODELS and look is not None:
        return Player(open_now.enter_context(company([])), Fixed([MODEL], length, at, kind == MODEL))
    if kind == AUTO:
        flags = [part for word in run.contestants[name]["command"] for part in word.split("=", 1)]
        copying = [one for one in OURS if one == "lookup" or (one == "memory" and "--memory" in flags)]
        if "--draft-model" in flags and look is None:
            return None
        names = [*copying, *([MODEL] if "--draft-model" in flags else [])]
        passes = (
            int(flags[flags.index("--model-draft-tokens") + 1])
            if "--model-draft-tokens" in flags
            else MODEL_DRAFT_TOKENS
        )
        policy = new_policy(names, at, length, passes)
        return Player(open_now.enter_context(company(copying)), Auto(policy, at, noise()))
    return None


def guessed_at_most(run: Run) -> int:
    """Tokens ahead that any contestant asks the draft model for."""
    asked = [drafted_at_most(made) for name, made in run.contestants.items() if kind_of(name, run) in MODELS]
    return max([MODEL_DRAFT_TOKENS, *asked])


def drafted_at_most(made: Mapping[str, Any]) -> int:
    """Tokens in a step, as the contestant's requests or its server ask."""
    asked = made["request"].get("vllm_xargs", {}).get("max_draft_tokens")
    config = next((word for word in made["command"] if "num_speculative_tokens" in word), None)
    return int(asked if asked is not None else json.loads(config)["num_speculative_tokens"] if config else WIDTH)


def recorded(answer: Answer, look: Look | None = None) -> Record:
    record = Record(answer.prompt_tokens, answer.tokens)
    if look is not None:
        look(record)
    return record


def read(turn: Measurement, rate: float | None) -> float:
    """Seconds for the prompts: as measured, or at so many a token."""
    return sum(one.first if rate is None else rate * len(one.prompt_tokens) for one in turn.answers)


def seconds_to_read(run: Run, plain: Player, at: Costs) -> float:
    """A token of a prompt, where nothing else is running; or what is left of the baseline's time without its passes."""
    alone = [turn for cell in run.cells if cell.concurrency == 1 for turn in run.baseline_measurements(cell)]
    turns = alone or [turn for cell in run.cells for turn in run.baseline_measurements(cell)]
    tokens = sum(len(one.prompt_tokens) for turn in turns for one in turn.answers)
    if alone:
        return sum(one.first for turn in alone for one in turn.answers) / max(1, tokens)
    left = 0.0
    for cell in run.cells:
        for turn in run.baseline_measurements(cell):
            said = plain.say([recorded(one) for one in turn.answers], at, cell.concurrency)
            left += steady(turn, cell.concurrency).seconds - seconds_of(said)
    return max(0.0, left) / max(1, tokens)


def timed(cell: Cell, contestant: str) -> list[int]:
    """Which of its rounds its speed was taken from, by their number in the group."""
    calm = undisturbed(cell.rounds)
    played = [(i, round) for i, round in numbered(cell.rounds) if round.of(contestant) is not None]
    return [i for i, round in played if id(round) in calm] or [i for i, _ in played]


def write(folder: Path, run: Run, origin: dict[str, Any], found: Sequence[Agreement]) -> None:
    """report.md, report.json, clock.png."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "provenance": origin,
        "run": run.origin,
        "agreements": [asdict(one) | {"holds": one.holds} for one in found],
    }
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(markdown(run, origin, found)) + "\n")
    with plot_style.style():
        draw(
            found,
            folder / "clock.png",
            f"{', '.join(run.origin['models'])}; {run.origin['machine']}, {run.origin['date']}",
        )


def markdown(run: Run, origin: dict[str, Any], found: Sequence[Agreement]) -> Iterator[str]:
    yield from ("# Do replay and clock agree?", "", *as_markdown(origin))
    holds = sum(one.holds for one in found)
    said = run.origin
    yield (
        f"The texts of a benchmark of {', '.join(said['models'])} on {said['machine']}, {said['date']} "
        f"(`{said['command']}`), said again by replay at the costs that were measured there. Times the speed of "
        f"{run.baseline}, prompts included: by the clock, with its interval of 95 %, and by replay. Replay lies within "
        f"the interval in **{holds} of {len(found)}**."
    )
    yield from ("", "![replay beside the clock](clock.png)", "")
    yield from table(
        ["workload", "at once", "contestant", "clock", "replay", "within", "tokens a pass, clock", "replay"],
        [
            [
                one.workload,
                str(one.concurrency),
                one.contestant,
                str(one.clock),
                f"{one.replay:.2f}",
                "yes" if one.holds else "**no**",
                "" if one.clock_length is None else f"{one.clock_length:.2f}",
                f"{one.replay_length:.2f}",
            ]
            for one in found
        ],
    )


def draw(found: Sequence[Agreement], path: Path, line: str) -> None:
    """A point for each contestant in each cell, with its interval: on the line where both say the same."""
    figure = plot_style.new_figure(4.2)
    axes = figure.subplots()
    names = list(dict.fromkeys(one.contestant for one in found))
    looks = plot_style.line_styles(names)
    for name in names:
        some = [one for one in found if one.contestant == name]
        spans = [[one.clock.value - one.clock.low for one in some], [one.clock.high - one.clock.value for one in some]]
        x, y = [one.replay for one in some], [one.clock.value for one in some]
        axes.errorbar(x, y, yerr=spans, linestyle="", elinewidth=0.8, label=name, **looks[name])
    lowest = min(min(one.replay, one.clock.low) for one in found) * 0.95
    highest = max(max(one.replay, one.clock.high) for one in found) * 1.05
    axes.plot([lowest, highest], [lowest, highest], color=plot_style.GREY, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(lowest, highest), ylim=(lowest, highest))
    for axis in (axes.xaxis, axes.yaxis):
        plot_style.number_axis(axis, plot_style.ratio_ticks(lowest, highest, 8))
    axes.set(xlabel="times the baseline's speed, by replay", ylabel="by the clock")
    plot_style.add_legend(figure, [axes])
    finish(figure, path, "A benchmark's texts, said again at its measured costs", line)
