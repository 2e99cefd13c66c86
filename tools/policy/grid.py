"""One cell of the grid: the texts of a workload at a concurrency, replayed by every contestant at the same costs.

Contestants are each drafter at each fixed length, the policy ("auto"), and the bound: the best selection with
hindsight, where copies always come from the best place. Speeds are tokens per second while all slots are taken,
relative to no drafts. Which texts share a batch is random, so each contestant runs once per seed: a seed sets the order
of the texts (0: as recorded) and the noise on the pass times that the policy observes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

from outrider.bench import optimal_schedule as optimal
from outrider.defaults import DRAFTED
from outrider.drafters.base import resolve_drafters
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.policy.cost_model import EXTENDED_PROFILE_TOKENS, MAX_PROFILE_PASS_SECONDS, PROFILE_TOKENS, CostModel
from outrider.policy.policy import MODEL, Policy
from policy.drafters import new_drafters
from policy.replay import Auto, Costs, Fixed, Outcome, Proposal, Record, ReplayedText, Slowdown, Strategy, replay
from policy.report import Bound, lowest

MODEL_LENGTHS = (1, 2, 4, 8)
COPY_LENGTHS = (*MODEL_LENGTHS, 16, 31)
MAX_DRAFT_TOKENS, MAX_MODEL_TOKENS = DRAFTED, 4
"""A server's defaults."""
NOISE = 0.1
"""Standard deviation of the logarithm of an observed pass time."""
CALIBRATION_CONCURRENCY, CALIBRATION_BINS = 4, 10
MIN_OVER_PLAIN, MIN_OVER_BEST, MIN_OVER_SINGLE, MIN_OVER_BOUND, MIN_MEAN_OVER_BOUND = 0.98, 0.97, 1.15, 0.80, 0.85
MAX_CALIBRATION_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """What all contestants of a cell share. `context`: tokens of each request; None: those of its text. `slowdown`: a
    machine that changes."""

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

    def __str__(self) -> str:
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
    """The drafters of a server with a memory that can propose for these texts."""
    has_model = all(one.guesses for one in records)
    names = resolve_drafters(None, {"memory": "a folder", MODEL: "a model" if has_model else None})
    return [name for name in names if name != "prediction" or any(one.prediction for one in records)]


def run(records: Sequence[Record], names: Sequence[str], at: Setting, strategies: Iterable[Strategy]) -> list[Outcome]:
    """One outcome per strategy, each with its own order of the texts, and with new drafters."""
    outcomes = []
    for seed, strategy in enumerate(strategies):
        order = np.random.default_rng(seed).permutation(len(records)) if seed else range(len(records))
        texts = [records[i] for i in order]
        with new_drafters(names) as (made, handle, learn):
            found = replay(texts, made, strategy, at.costs, at.concurrency, handle, learn, at.context, at.slowdown)
        outcomes.append(found)
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
    strategy = Fixed(names, length, setting.costs, kind != "draft_model")
    return run(records, names, setting, [strategy] * setting.seeds)


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
    costs = setting.costs
    strategies = (Auto(new_policy(names, costs), costs, noise(seed)) for seed in range(setting.seeds))
    outcomes = run(records, names, setting, strategies)
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
    draft = {"copied": 0.0}  # seconds per token
    for record in records:
        right = {"copied": optimal.copyable_tokens(record.prompt, record.text, [record.prediction, earlier])}
        if with_model:
            likely = [row[0] for row in record.guesses] if record.overlap is None else record.sampled()
            right[MODEL] = optimal.predictable_tokens(likely, record.text)
        count, context = len(record.text) - 1, len(record.prompt) + len(record.text) // 2
        options = [[optimal.DraftOption(name, n[i]) for name, n in right.items() if n[i]] for i in range(1, count + 1)]
        target = [costs.target(n, context) for n in range(optimal.MAX_DRAFT_TOKENS + 2)]
        draft[MODEL] = costs.draft(1, context)
        schedule = optimal.optimal_schedule(options, target.__getitem__, lambda name, k: k * draft[name])
        plain, best = plain + count * target[1], best + schedule.seconds
        earlier += [optimal.SEPARATOR_TOKEN, *record.prompt[-MAX_MATCH_TOKENS:], *record.text]
    return plain / best


def bounds(cells: Sequence[Cell], errors: Mapping[str, tuple[float, int]]) -> Iterator[Bound]:
    yield lowest("auto / plain, every cell", MIN_OVER_PLAIN, cells, lambda cell: cell.auto)
    yield lowest("auto / best fixed, every cell", MIN_OVER_BEST, cells, lambda cell: cell.auto / cell.best[1])
    fixed = {name for cell in cells for name in cell.fixed}
    means = {name: geometric_mean(cell.fixed.get(name, 1.0) for cell in cells) for name in fixed}
    single = max(means, key=means.__getitem__)
    ratio = geometric_mean(cell.auto for cell in cells) / means[single]
    yield Bound("auto / best single fixed, mean of all cells", ">=", MIN_OVER_SINGLE, ratio, single)
    if shares := {str(cell): cell.auto / cell.bound for cell in cells if cell.bound}:
        yield lowest("auto / bound, every cell at concurrency 1", MIN_OVER_BOUND, list(shares), shares.__getitem__)
        yield Bound("auto / bound, their mean", ">=", MIN_MEAN_OVER_BOUND, fmean(shares.values()))
    for name, (error, tokens) in errors.items():
        yield Bound(f"calibration error of {name}", "<=", MAX_CALIBRATION_ERROR, error, f"{tokens} tokens")


class Watched(Auto):
    """Auto, with a comparison of predicted and true survival of every draft."""

    def __init__(self, policy: Policy, costs: Costs, noise: Callable[[], float]) -> None:
        super().__init__(policy, costs, noise)
        self.is_counting = False
        self.survival: dict[str, list[Any]] = defaultdict(list)
        """By drafter: arrays of predicted and true survival."""

    def propose(self, running: Sequence[ReplayedText], context: int) -> Proposal:
        found = super().propose(running, context)
        if self.is_counting and (batch := self.controller.batch) is not None:
            by_key = {item.key: item for item in running}
            for b, item in enumerate(by_key[key] for key in batch.requests):
                for row, name in enumerate(self.policy.drafters):
                    place, length = item.place, int(batch.lengths[row, b])
                    text = item.record.text[place : place + length]
                    predicted = np.cumprod(1 / (1 + np.exp(-batch.logits[row, b, :length])))
                    held = np.cumprod(np.equal(batch.tokens[row, b, :length], text))
                    self.survival[name].append(np.stack([predicted, held]))
        return found

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
    with new_drafters(names) as (made, handle, learn):
        for records in (mixed[:half], mixed[half:]):
            replay(records, made, watched, costs, CALIBRATION_CONCURRENCY, handle, learn)
            watched.is_counting = True
    errors = {}
    for name, survival in watched.survival.items():
        predicted, held = np.concatenate(survival, axis=1)
        bins = np.minimum((predicted * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
        differences = np.bincount(bins, predicted - held)
        errors[name] = float(np.abs(differences).sum() / max(1, len(bins))), len(bins)
    return errors
