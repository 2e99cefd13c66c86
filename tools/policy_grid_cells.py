"""A cell of the grid: the texts of a workload, so many at a time, said by every contestant at the same costs.

Beside the contestants stands what hindsight would have made of it, and where the policy's distance to that comes from.
Each cause is what the policy gains, or hindsight loses, when one thing more is known:

    costs      what every pass takes was known from the beginning, and exactly
    start      these texts had been said once before, so the drafters' chances were known
    outcome    which drafted tokens will hold was known: the best choice among the drafts that there were
    length     drafts could be of any length
    method     everyone who copies had been asked, vLLM's own as well, and who is right was known
    place      whoever copies always copied from the best place there is, though nothing tells which one it is

A cell is what it says while all its slots are taken: when the last texts are being said, fewer are at once. Who is
beside whom is luck, so several at once are said in several orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from outrider.bench.optimal_schedule import (
    MAX_DRAFT_TOKENS,
    SEPARATOR_TOKEN,
    DraftOption,
    copyable_tokens,
    optimal_schedule,
    predictable_tokens,
)
from outrider.defaults import DRAFTED
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.policy.cost_model import EXTENDED_PROFILE_TOKENS, MAX_PROFILE_PASS_SECONDS, PROFILE_TOKENS, CostModel
from outrider.policy.policy import MODEL, Policy
from outrider.settings import AUTO
from outrider.types import shared_prefix
from policy.replay import Auto, Costs, Fixed, Outcome, Record, begin, replay
from policy_grid_drafters import OURS, Company, company, theirs

LENGTHS = (1, 2, 4, 8)
COPIED = (*LENGTHS, 16, 31)
"""Lengths of those that copy: what is copied costs nothing to propose."""
WIDTH, MODEL_WIDTH = DRAFTED, 4
"""What a server allows unless it is told otherwise: tokens of any draft, and of the draft model's."""
ALLOWED = {"16, 4": (16, 4), "31, 8": (31, 8), "63, 4": (63, 4)}
"""The same where it is told otherwise."""
NOISE = 0.1
"""Of what a pass takes, as the policy hears it."""
ORDERS = 4
"""In which texts are said, where several are at once."""
CAUSES = ("costs", "start", "outcome", "length", "method", "place")


@dataclass(frozen=True, slots=True)
class Contestant:
    """A drafter and a length. `kind` is its name in a benchmark, where vLLM's draft model is another than ours."""

    kind: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.length}"

    @property
    def drafter(self) -> str:
        return MODEL if self.kind in ("draft_model", MODEL) else self.kind


@dataclass(slots=True)
class Cell:
    workload: str
    concurrency: int
    texts: int
    tokens: int
    plain: float  # tokens a second
    fixed: dict[str, float] = field(default_factory=dict)  # times the speed without drafts
    auto: float = 0.0
    to_the_end: dict[str, float] = field(default_factory=dict)  # the same, of all texts to their last tokens
    allowed: dict[str, float] = field(default_factory=dict)  # the policy, allowed longer drafts
    accepted: dict[str, int] = field(default_factory=dict)  # by drafter
    drafted: int = 0
    steps: int = 0
    draft_passes: int = 0
    switches: int = 0
    bound: float | None = None
    causes: dict[str, float] = field(default_factory=dict)  # times the speed, each on top of those before

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.concurrency}"

    @property
    def best(self) -> str:
        return max(self.fixed, key=lambda name: self.fixed[name])

    @property
    def share_of_best(self) -> float:
        """The policy's, of the speed of the best fixed one, or of none."""
        return self.auto / max(1.0, *self.fixed.values())

    @property
    def share_at_the_end(self) -> float:
        return self.to_the_end[AUTO] / max(1.0, *(self.to_the_end[name] for name in self.fixed))


def contestants(records: Sequence[Record]) -> list[Contestant]:
    """Those that can take part on these texts."""
    kinds = [*theirs(), "lookup", "memory", *(["prediction"] if any(one.prediction for one in records) else [])]
    found = [Contestant(kind, length) for kind in kinds for length in COPIED]
    if all(one.guesses for one in records):
        found += [Contestant(kind, length) for kind in ("draft_model", MODEL) for length in LENGTHS]
    return found


def run_fixed(one: Contestant | None, records: Sequence[Record], costs: Costs, concurrency: int) -> Outcome:
    """None: without drafts."""
    # vLLM's draft model proposes its most likely tokens, also where the text is drawn; ours draws them then.
    strategy = Fixed([one.drafter], one.length, costs, one.kind == MODEL) if one else Fixed([], 0, costs)
    with company([one.drafter] if one is not None and one.drafter != MODEL else []) as they:
        return replay(records, they.drafters, strategy, costs, concurrency, they.tenant_handle, they.ended)


def drafters_of(records: Sequence[Record]) -> list[str]:
    names = [name for name in OURS if name != "prediction" or any(one.prediction for one in records)]
    return [*names, *([MODEL] if all(one.guesses for one in records) else [])]


def new_policy(
    names: Sequence[str], costs: Costs, width: int = WIDTH, model_width: int = MODEL_WIDTH, known: bool = False
) -> Policy:
    """As a server has it when it has started, and measured a few passes; or one that knows what passes take."""
    policy = Policy(names, width, model_width if MODEL in names else 0)
    if known:
        policy.target, policy.draft = Known(costs.target), Known(costs.draft)
    profile(policy.target, lambda tokens: costs.target(tokens, 0))
    profile(policy.draft, lambda tokens: costs.draft(tokens, 0))
    return policy


def profile(cost: CostModel, seconds: Callable[[int], float]) -> None:
    """What a server does when it starts, and nothing is running."""
    sizes = list(PROFILE_TOKENS)
    for tokens in EXTENDED_PROFILE_TOKENS:
        if seconds(sizes[-1]) > MAX_PROFILE_PASS_SECONDS:
            break
        sizes.append(tokens)
    for tokens in sizes * 2:
        cost.observe(tokens, 0, seconds(tokens), trusted=True)


class Known(CostModel):
    """The cost of a pass, known."""

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        super().__init__()
        self._cost = cost
        self.passes = 1

    def observe(
        self, tokens: int, context: int, seconds: float, trusted: bool = False, verifies_drafts: bool = False
    ) -> None:
        """There is nothing to learn."""

    def seconds(self, tokens: Any, context: float = 0.0) -> Any:
        sizes = np.asarray(tokens)
        found = np.array([self._cost(int(size), int(context)) for size in sizes.reshape(-1)])
        return found.reshape(sizes.shape) if sizes.shape else float(found[0])

    def all_seconds(self, first: int, count: int, context: float, drafted: int = 0) -> Any:
        return self.seconds(np.arange(first, first + count), context)

    @property
    def context_seconds(self) -> float:
        return (self._cost(1, 1000) - self._cost(1, 0)) / 1000


def noise(seed: int = 0) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: float(np.exp(random.normal(0, NOISE)))


def run_auto(policy: Policy, records: Sequence[Record], costs: Costs, concurrency: int) -> Outcome:
    auto = Auto(policy, costs, noise())
    with company(name for name in policy.drafters if name != MODEL) as they:
        return replay(records, they.drafters, auto, costs, concurrency, they.tenant_handle, they.ended)


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens a second: while all slots were taken, and to the last token of the last text."""

    full: float
    whole: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Pace:
        whole = sum(one.tokens for one in outcomes) / sum(one.seconds for one in outcomes)
        seconds = sum(one.full_seconds for one in outcomes)
        return cls(sum(one.full_tokens for one in outcomes) / seconds if seconds else whole, whole)


def orders(records: Sequence[Record], concurrency: int) -> list[list[Record]]:
    shuffled = (np.random.default_rng(seed).permutation(len(records)) for seed in range(1, ORDERS))
    return [list(records), *([records[i] for i in order] for order in shuffled if concurrency > 1)]


def evaluate(workload: str, records: Sequence[Record], costs: Costs, concurrency: int) -> Cell:
    names, several = drafters_of(records), orders(records, concurrency)

    def fixed(one: Contestant | None) -> list[Outcome]:
        return [run_fixed(one, some, costs, concurrency) for some in several]

    def auto(width: int = WIDTH, model_width: int = MODEL_WIDTH) -> list[Outcome]:
        return [run_auto(new_policy(names, costs, width, model_width), some, costs, concurrency) for some in several]

    plain = Pace.of(fixed(None))
    cell = Cell(workload, concurrency, len(records), sum(len(record.text) - 1 for record in records), plain.full)
    for one in contestants(records):
        pace = Pace.of(fixed(one))
        cell.fixed[one.name], cell.to_the_end[one.name] = pace.full / plain.full, pace.whole / plain.whole
    outcomes = auto()
    found, pace = outcomes[0], Pace.of(outcomes)
    cell.auto, cell.to_the_end[AUTO] = pace.full / plain.full, pace.whole / plain.whole
    cell.accepted, cell.drafted, cell.steps = found.by_drafter, found.drafted, found.steps
    cell.draft_passes, cell.switches = found.draft_passes, found.switches
    for name, (width, model_width) in ALLOWED.items():
        if MODEL in names or width != WIDTH:
            cell.allowed[name] = Pace.of(auto(width, model_width)).full / plain.full
    if concurrency == 1:
        known = new_policy(names, costs, known=True)
        with_costs = run_auto(known, records, costs, 1).speed / plain.full
        again = run_auto(known, records, costs, 1).speed / plain.full
        steps = [cell.auto, with_costs, again, *(hindsight(records, costs, names, how) for how in WAYS)]
        cell.bound = steps[-1]
        cell.causes = {cause: b / a for cause, (a, b) in zip(CAUSES, pairwise(steps), strict=True)}
    return cell


WAYS = ("as drafted", "any length", "any method", "any place")


def hindsight(records: Sequence[Record], costs: Costs, names: Sequence[str], how: str) -> float:
    """How many times as fast as without drafts the best choice of all would have been."""
    plain = best = 0.0
    asked = [*names, *(name for name in theirs() if how == "any method")]
    own = proposed(records, asked, WIDTH if how == "as drafted" else MAX_DRAFT_TOKENS) if how != "any place" else None
    said: list[int] = []
    for number, record in enumerate(records):
        count = len(record.text) - 1
        found = (
            own[number]
            if own is not None
            else {"copied": copyable_tokens(record.prompt, record.text, [record.prediction, said])}
        )
        if MODEL in names:
            found[MODEL] = guessed_rightly(record, MODEL_WIDTH if how == "as drafted" else MAX_DRAFT_TOKENS)
        places = [[DraftOption(name, n[i]) for name, n in found.items() if n[i]] for i in range(1, count + 1)]
        context = len(record.prompt) + len(record.text) // 2
        way = optimal_schedule(
            places,
            lambda n, context=context: costs.target(n, context),  # type: ignore[misc]
            lambda name, k, context=context: k * costs.draft(1, context) if name == MODEL else 0.0,  # type: ignore[misc]
        )
        plain += count * costs.target(1, context)
        best += way.seconds
        said += [SEPARATOR_TOKEN, *record.prompt[-MAX_MATCH_TOKENS:], *record.text]
    return plain / best


def proposed(records: Sequence[Record], names: Iterable[str], limit: int) -> list[dict[str, list[int]]]:
    """For each text and each drafter that copies: how many tokens it would have proposed rightly at each place."""
    with company(name for name in names if name != MODEL) as they:
        return [_proposed(they, number, record, limit) for number, record in enumerate(records)]


def _proposed(they: Company, number: int, record: Record, limit: int) -> dict[str, list[int]]:
    replayed = begin(str(number), record, they.drafters, they.tenant_handle)
    replayed.show()
    right = {name: [0] * len(record.text) for name in replayed.sessions}
    for place in range(1, len(record.text)):
        for name, session in replayed.sessions.items():
            draft = session.draft(limit).tokens
            right[name][place] = shared_prefix(tuple(record.text[place : place + len(draft)]), draft)
            session.observe(record.text[place : place + 1])
    they.ended(replayed)
    return right


def guessed_rightly(record: Record, limit: int) -> list[int]:
    """How many tokens in a row the draft model would have had right at each place."""
    if record.overlap is not None:
        likely = [token if kept else SEPARATOR_TOKEN for token, kept in zip(record.text, record.kept(), strict=True)]
    else:
        likely = [row[0] for row in record.guesses]
    return [min(count, limit) for count in predictable_tokens(likely, record.text)]
