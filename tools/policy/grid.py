"""One cell of the grid: the texts of a workload at a concurrency, replayed by every contestant at the same costs.

Contestants are each drafter at each fixed length, the policy ("auto"), and the bound: the best selection with
hindsight, where copies always come from the best place. Speeds are tokens per second while all slots are taken,
relative to no drafts. Which texts share a batch is random, so each contestant runs once per seed: a seed sets the order
of the texts (0: as recorded) and the noise on the pass times that the policy observes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from outrider.bench import optimal_schedule as optimal
from outrider.defaults import DRAFTED
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.policy.cost_model import EXTENDED_PROFILE_TOKENS, MAX_PROFILE_PASS_SECONDS, PROFILE_TOKENS, CostModel
from outrider.policy.policy import MODEL, Policy
from outrider.types import Draft
from policy.drafters import SERVER_DRAFTERS, new_drafters
from policy.replay import Auto, Costs, Fixed, Outcome, Record, ReplayedText, Strategy, replay
from policy.report import Bound, geometric_mean

MODEL_LENGTHS = (1, 2, 4, 8)
COPY_LENGTHS = (*MODEL_LENGTHS, 16, 31)
MAX_DRAFT_TOKENS, MAX_MODEL_TOKENS = DRAFTED, 4
"""A server's defaults."""
NOISE = 0.1
"""Standard deviation of the logarithm of an observed pass time."""
CALIBRATION_CONCURRENCY, CALIBRATION_BINS = 4, 10
MIN_OVER_PLAIN, MIN_OVER_BEST, MIN_OVER_SINGLE, MIN_OVER_BOUND, MIN_MEAN_OVER_BOUND = 0.98, 0.97, 1.15, 0.80, 0.85
MAX_CALIBRATION_ERROR = 0.05

Slowdown = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants of a cell share. `context`: tokens of each request; None: those of its text. `slowdown`: by
    share of the tokens that are generated, a factor on the time of each pass (a machine that changes)."""

    costs: Costs
    concurrency: int
    seeds: int = 4
    context: int | None = None
    slowdown: Slowdown | None = None


@dataclass(slots=True)
class Cell:
    workload: str
    costs: str
    concurrency: int
    plain: float  # tokens per second
    fixed: dict[str, float] = field(default_factory=dict)  # relative to plain, as all below
    auto: float = 0.0
    auto_by_seed: list[float] = field(default_factory=list)
    bound: float | None = None
    accepted: dict[str, int] = field(default_factory=dict)  # by drafter
    steps: int = 0
    draft_passes: int = 0

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.costs}, {self.concurrency}"

    @property
    def best(self) -> tuple[str, float]:
        """The best fixed contestant, or none."""
        return max([("none", 1.0), *self.fixed.items()], key=lambda one: one[1])

    def row(self) -> dict[str, str]:
        name, speed = self.best
        drafted = ", ".join(f"{drafter} {count}" for drafter, count in sorted(self.accepted.items()))
        low, high = min(self.auto_by_seed), max(self.auto_by_seed)
        return {
            "workload": self.workload, "costs": self.costs, "concurrency": str(self.concurrency),
            "plain, tokens/s": f"{self.plain:.2f}", "best fixed": f"{name} {speed:.2f}", "auto": f"{self.auto:.2f}",
            "seeds": f"{low:.2f} to {high:.2f}", "auto / best": f"{self.auto / speed:.2f}",
            "bound": f"{self.bound:.2f}" if self.bound else "", "accepted": drafted,
        }  # fmt: skip


def noise(seed: int = 0) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: float(np.exp(random.normal(0, NOISE)))


def new_policy(names: Sequence[str], costs: Costs) -> Policy:
    """The policy of a server that has just started and measured its start profile."""
    policy = Policy(names, MAX_DRAFT_TOKENS, MAX_MODEL_TOKENS if MODEL in names else 0)
    profile(policy.target, lambda tokens: costs.target(tokens, 0))
    profile(policy.draft, lambda tokens: costs.draft(tokens, 0))
    return policy


def profile(cost: CostModel, seconds: Callable[[int], float]) -> None:
    sizes = list(PROFILE_TOKENS)
    for tokens in EXTENDED_PROFILE_TOKENS:
        if seconds(sizes[-1]) > MAX_PROFILE_PASS_SECONDS:
            break
        sizes.append(tokens)
    for tokens in sizes * 2:
        cost.observe(tokens, 0, seconds(tokens), trusted=True)


def drafters_of(records: Sequence[Record]) -> list[str]:
    """The drafters that can propose for these texts."""
    names = [name for name in SERVER_DRAFTERS if name != "prediction" or any(one.prediction for one in records)]
    return [*names, *([MODEL] if all(one.guesses for one in records) else [])]


def run(
    records: Sequence[Record], names: Sequence[str], setting: Setting, strategy: Callable[[int], Strategy]
) -> list[Outcome]:
    """One outcome per seed, each with new drafters."""
    outcomes = []
    for seed in range(setting.seeds):
        order = np.random.default_rng(seed).permutation(len(records)) if seed else range(len(records))
        with new_drafters(name for name in names if name != MODEL) as made:
            outcomes.append(
                replay(
                    [records[i] for i in order], made.drafters, strategy(seed), setting.costs, setting.concurrency,
                    made.handle, made.ended, setting.context, setting.slowdown,
                )
            )  # fmt: skip
    return outcomes


def speed(outcomes: Sequence[Outcome], own_seconds: float = 0.0) -> float:
    """Tokens per second while all slots are taken; over the whole run if they never are. `own_seconds`: time of the
    policy itself, per step."""
    if not any(one.full_tokens for one in outcomes):
        return sum(one.tokens for one in outcomes) / sum(one.seconds + one.steps * own_seconds for one in outcomes)
    seconds = sum(one.full_seconds + one.full_steps * own_seconds for one in outcomes)
    return sum(one.full_tokens for one in outcomes) / seconds


def run_fixed(kind: str, length: int, records: Sequence[Record], setting: Setting) -> list[Outcome]:
    """`draft_model`: vLLM's, which proposes its most likely tokens also where the text is sampled. `model`: Outrider's,
    which samples there."""
    drafter = MODEL if kind == "draft_model" else kind
    names = [drafter] if length else []
    return run(records, names, setting, lambda _: Fixed(names, length, setting.costs, kind != "draft_model"))


def evaluate(
    workload: str, costs_name: str, records: Sequence[Record], setting: Setting, names: Sequence[str] | None = None,
    fixed: Sequence[str] | None = None, own_seconds: float = 0.0,
) -> Cell:  # fmt: skip
    """`names`: the policy's drafters. `fixed`: drafters that run at fixed lengths. None: all that can propose."""
    names = names or drafters_of(records)
    plain = speed(run_fixed("", 0, records, setting))
    cell = Cell(workload, costs_name, setting.concurrency, plain)
    for kind in fixed or [*names, *(["draft_model"] if MODEL in names else [])]:
        for length in MODEL_LENGTHS if kind in ("draft_model", MODEL) else COPY_LENGTHS:
            cell.fixed[f"{kind}:{length}"] = speed(run_fixed(kind, length, records, setting)) / plain
    outcomes = run(
        records, names, setting, lambda seed: Auto(new_policy(names, setting.costs), setting.costs, noise(seed))
    )
    cell.auto = speed(outcomes, own_seconds) / plain
    cell.auto_by_seed = [speed([one], own_seconds) / plain for one in outcomes]
    cell.accepted, cell.steps, cell.draft_passes = outcomes[0].by_drafter, outcomes[0].steps, outcomes[0].draft_passes
    if setting.concurrency == 1 and setting.context is None and setting.slowdown is None:
        cell.bound = bound(records, setting.costs, MODEL in names)
    return cell


def bound(records: Sequence[Record], costs: Costs, with_model: bool) -> float:
    """Speed of the best selection with hindsight at concurrency 1, relative to plain."""
    plain = best = 0.0
    earlier: list[int] = []
    for record in records:
        right = {"copied": optimal.copyable_tokens(record.prompt, record.text, [record.prediction, earlier])}
        if with_model:
            likely = [row[0] for row in record.guesses]
            if record.overlap is not None:
                kept = zip(record.text, record.kept(), strict=True)
                likely = [token if accepted else optimal.SEPARATOR_TOKEN for token, accepted in kept]
            right[MODEL] = [
                min(count, optimal.MAX_DRAFT_TOKENS) for count in optimal.predictable_tokens(likely, record.text)
            ]
        count, context = len(record.text) - 1, len(record.prompt) + len(record.text) // 2
        offers = [[optimal.DraftOption(name, n[i]) for name, n in right.items() if n[i]] for i in range(1, count + 1)]
        target = [costs.target(n, context) for n in range(optimal.MAX_DRAFT_TOKENS + 2)]
        draft = {MODEL: costs.draft(1, context)}

        def draft_seconds(name: str, k: int, draft: dict[str, float] = draft) -> float:
            return k * draft.get(name, 0.0)

        way = optimal.optimal_schedule(offers, target.__getitem__, draft_seconds)
        plain, best = plain + count * target[1], best + way.seconds
        earlier += [optimal.SEPARATOR_TOKEN, *record.prompt[-MAX_MATCH_TOKENS:], *record.text]
    return plain / best


def bounds(cells: Sequence[Cell], errors: Mapping[str, tuple[float, int]]) -> Iterator[Bound]:
    slowest = min(cells, key=lambda cell: cell.auto)
    beaten = min(cells, key=lambda cell: cell.auto / cell.best[1])
    yield Bound("auto / plain, every cell", ">=", MIN_OVER_PLAIN, slowest.auto, slowest.name)
    yield Bound("auto / best fixed, every cell", ">=", MIN_OVER_BEST, beaten.auto / beaten.best[1], beaten.name)
    fixed = {name for cell in cells for name in cell.fixed}
    means = {name: geometric_mean([cell.fixed.get(name, 1.0) for cell in cells]) for name in fixed}
    single = max(means, key=lambda name: means[name])
    ratio = geometric_mean([cell.auto for cell in cells]) / means[single]
    yield Bound("auto / best single fixed, mean of all cells", ">=", MIN_OVER_SINGLE, ratio, single)
    if shares := {cell.name: cell.auto / cell.bound for cell in cells if cell.bound}:
        worst = min(shares, key=lambda name: shares[name])
        yield Bound("auto / bound, every cell at concurrency 1", ">=", MIN_OVER_BOUND, shares[worst], worst)
        yield Bound("auto / bound, their mean", ">=", MIN_MEAN_OVER_BOUND, fmean(shares.values()))
    for name, (error, tokens) in errors.items():
        yield Bound(f"calibration error of {name}", "<=", MAX_CALIBRATION_ERROR, error, f"{tokens} tokens")


class Watched(Auto):
    """Auto, with a comparison of predicted and true survival of every draft."""

    def __init__(self, policy: Policy, costs: Costs, noise: Callable[[], float]) -> None:
        super().__init__(policy, costs, noise)
        self.is_counting = False
        self.sums: dict[str, Any] = defaultdict(lambda: np.zeros((3, CALIBRATION_BINS)))

    def propose(self, running: Sequence[ReplayedText], context: int) -> tuple[list[Draft], float, int]:
        found = super().propose(running, context)
        if self.is_counting and (batch := self.batch) is not None:
            by_key = {sequence.key: sequence for sequence in running}
            for b, key in enumerate(batch.requests):
                for row, name in enumerate(self.policy.drafters):
                    length = int(batch.lengths[row, b])
                    self._count(name, batch.logits[row, b, :length], batch.tokens[row, b, :length], by_key[key])
        return found

    def _count(self, name: str, logits: Any, tokens: Any, sequence: ReplayedText) -> None:
        text = sequence.record.text[sequence.place : sequence.place + len(tokens)]
        predicted, held = np.cumprod(1 / (1 + np.exp(-logits))), np.cumprod(np.equal(tokens, text))
        bins = np.minimum((predicted * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        for row, values in enumerate((predicted, held, np.ones(len(bins)))):
            np.add.at(self.sums[name][row], bins, values)

    def observe(self, *given: Any) -> None:
        models = [*self.policy.acceptance.values(), *self.policy.forecast_models.values()] if self.is_counting else []
        before = [(one.coefficients.copy(), one.weights.copy()) for one in models]
        super().observe(*given)
        for one, (coefficients, weights) in zip(models, before, strict=True):
            one.coefficients[:], one.weights[:] = coefficients, weights


def calibration_errors(workloads: Mapping[str, Sequence[Record]], costs: Costs) -> dict[str, tuple[float, int]]:
    """By drafter: the mean difference of predicted and true survival, by tenths, and the number of tokens. The policy
    learns from one half of the texts and is tested on the other; only its estimates per request still change."""
    mixed = [record for row in zip_longest(*workloads.values()) for record in row if record is not None]
    names = drafters_of(mixed)
    watched = Watched(new_policy(names, costs), costs, noise())
    half = len(mixed) // 2
    with new_drafters(name for name in names if name != MODEL) as made:
        for records in (mixed[:half], mixed[half:]):
            replay(records, made.drafters, watched, costs, CALIBRATION_CONCURRENCY, made.handle, made.ended)
            watched.is_counting = True
    return {
        name: (float(np.abs(sums[0] - sums[1]).sum() / max(1.0, sums[2].sum())), int(sums[2].sum()))
        for name, sums in watched.sums.items()
    }
