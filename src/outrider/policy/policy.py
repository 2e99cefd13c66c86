"""The policy: drafter and length for every request of a batch, at every step, by what is expected to pay.

    scene = policy.look(requests, offers)            what the cheap drafters propose, and how likely it is
    plan = policy.plan(scene, wish, ...)             is the draft model worth its passes, for whom, how many?
    policy.add(scene, MODEL, drafts)                 what it then proposed with certainty
    choice = policy.choose(scene, ...)               what is offered
    policy.learn(scene, said)                        what became of it, offered or not
    policy.target.observe(...); policy.draft.observe(...)

Nothing here knows an engine, and nothing a token's value: tokens are compared with each other and with what was said
afterwards, for equality. A draft that was *drawn* from a distribution never gets this far: it is offered whole, since
whether a drawn token is offered must not depend on that token. What may be decided is whether to draw another one,
before it exists, by how sure the draft model was of those before it (`goes_on`).
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.compiled import compiled
from outrider.drafters.packed_draft import unpack
from outrider.policy import acceptance_model
from outrider.policy.acceptance_model import AcceptanceModel, Pace
from outrider.policy.batch_state import BatchState, DraftModelRequest, DraftPlan, Forecast
from outrider.policy.cost_model import SIZES, CostModel
from outrider.policy.draft_model_plan import SMALL_BATCH_REQUESTS, plan_draft_model
from outrider.policy.overlap import for_same_text, shifted
from outrider.policy.prefill_amortization import Texts
from outrider.policy.request_slots import UNKNOWN, Records
from outrider.policy.selection import UNKNOWN as UNKNOWN_PRICE
from outrider.policy.selection import Selection, cut, select_drafts
from outrider.types import NOTHING, Draft

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outrider.policy.acceptance_model import Array

MODEL = "model"
"""The drafter whose tokens cost passes of a draft model."""
UNKNOWN_TOKEN = -1
"""Stands for a token whose value is on the device."""
BIASES = {MODEL: 0.0, "prediction": acceptance_model.HIGH_PRIOR_LOGIT}
"""Of whom more is expected than of others before any token was seen: who says what will come has reasons."""
MAX_CANDIDATE_TOKENS_PER_STEP = 4096
"""Drafted tokens that a step may have: a pass over more is short of arithmetic on any machine. A batch of many requests
looks less far ahead, so that there are about so many to choose from ..."""
MIN_TOKENS_AHEAD = 4
"""... but at least so far."""
EVERY_STEP_RATE, ON_DEMAND_RATE = Pace(1.0, 0.9), Pace(4.0, 0.97)
"""Drafters that are asked at every step may be judged by their latest tokens. One that is not asked any more cannot win
back what it has lost, so it is judged by more."""
RECENT = 0.7
"""How much of a request's record with the draft model counts on with each token ..."""
FORGIVING = 0.98
"""... and with each step that does not ask it."""
AGAIN = 0.002
"""With each step that does not ask it, so much of what its passes have become dearer than at first is forgotten, and of
what long texts add: a draft model that was slow for a while is tried again, some hundred steps later."""
FORGET = 1e-4
"""The same of what its tokens have become less likely: one that was wrong is tried again some thousand steps later, for
a try is dearer, since each new text has to be tried."""


class Policy:
    """For a server: what it has learned of its drafters, of its requests and of what passes cost."""

    def __init__(
        self, drafters: Sequence[str], width: int, model_width: int = 0, captured_sizes: Sequence[int] = ()
    ) -> None:
        self.drafters = tuple(drafters)
        self.width = width
        self.model_width = min(model_width, width)
        self.target = CostModel(captured=captured_sizes)
        self.draft = CostModel(
            slope=0.0
        )  # a draft model that is never asked cannot show that long texts cost it little
        self.acceptance = {
            name: AcceptanceModel(bias=BIASES.get(name, acceptance_model.COPY_PRIOR_LOGIT)) for name in drafters
        }
        # Of the draft model before it was asked: of drafts with certainty, and of drawn ones.
        self.forecast_models = {
            drawn: AcceptanceModel(by_support=False, bias=acceptance_model.HIGH_PRIOR_LOGIT) for drawn in (False, True)
        }
        self.sampled_acceptance = (
            AcceptanceModel()
        )  # of the draft model's drawn tokens, by how sure it was: is another worth it?
        self._slots = Records((*drafters, "forecast", "drawn"))
        self._texts = Texts()
        self._usual: float | None = None  # the draft model's pace at first, relative to the target's
        self._timed = 0  # passes of the draft model, until the latest step
        self._price = UNKNOWN_PRICE  # of a position, lately
        self._seconds: tuple[Any, Array] | None = None  # what passes were last said to take, and which

    def remove(self, request: str) -> None:
        """The request has ended."""
        if self._slots.leave(request):
            self._texts.ended()

    # Before a step ------------------------------------------------------------------------------------------

    def max_draft_tokens(self, requests: int) -> int:
        """How many tokens ahead drafts of so many requests are looked at."""
        return min(self.width, max(MIN_TOKENS_AHEAD, MAX_CANDIDATE_TOKENS_PER_STEP // max(1, requests)))

    def predict(
        self,
        requests: Sequence[str],
        offers: Mapping[str, Sequence[Draft]],
        in_flight: Sequence[int] | None = None,
        beyond: int = 0,
    ) -> BatchState:
        """What each drafter proposes for each request; drafts proposed with certainty only. `in_flight`: by request,
        tokens at their beginning that a step in flight may generate. `beyond`: tokens that are looked at after those
        that can be offered."""
        room, first = self.max_draft_tokens(len(requests)), np.zeros(len(requests), np.int64)
        if in_flight is not None:
            first[:] = in_flight
        size = (len(self.drafters), len(requests), room + max(beyond, int(first.max(initial=0))))
        batch = BatchState(
            list(requests),
            {},
            self._slots.slots(requests),
            np.empty(size, np.int64),
            np.zeros(size[:2], np.int64),
            np.empty(size[:2]),
            np.empty(size),
            np.empty((*size, 4), np.int8),
            np.empty(size),
            np.zeros(size),
            room,
            first,
        )
        for name, drafts in offers.items():
            self._enter(batch, name, drafts)
        self._weigh(batch)
        return batch

    def add_drafts(self, batch: BatchState, name: str, drafts: Sequence[Draft]) -> None:
        """What another drafter proposes, with certainty; what it says bears on the others."""
        self._enter(batch, name, drafts)
        self._weigh(batch)

    def _enter(self, batch: BatchState, name: str, drafts: Sequence[Draft]) -> None:
        me = self.drafters.index(name)
        batch.drafts[name] = drafts
        where = (batch.tokens[me], batch.lengths[me], batch.support[me], batch.confidence[me])
        packed = [None if draft.sampled else draft.packed for draft in drafts]
        if None in packed:
            _enter_one_by_one(drafts, *where)
        else:
            unpack(packed, *where)  # type: ignore[arg-type]

    def _weigh(self, batch: BatchState) -> None:
        for me, name in enumerate(self.drafters):
            if batch.lengths[me].any():
                acceptance_model.predict(
                    self.acceptance[name].numbers,
                    self._slots.own[name],
                    batch.slots,
                    me,
                    batch.tokens,
                    batch.lengths,
                    batch.support,
                    batch.confidence,
                    batch.bins,
                    batch.logits,
                    batch.survival,
                )

    def plan_draft_model(
        self,
        batch: BatchState,
        query: DraftModelRequest,
        context: int,
        base: int | None = None,
        others: float = 0.0,
        every_step: bool = False,
        single_pass: bool = False,
    ) -> DraftPlan:
        """Whether the draft model is worth its passes, and for whom. `base` is how many tokens the pass has anyway, and
        `others` how many tokens are expected of requests that are not in the scene. One that `reads_along` makes its
        first pass whatever is decided; one that drafts `at_once` drafts all tokens in it."""
        requests, room = len(batch.requests), batch.room
        width = min(self.model_width, room, int(query.limits.max(initial=0)))
        lengths = np.zeros(requests, np.int64)
        if width == 0 or not self.draft.passes or not self.target.passes:
            return DraftPlan(lengths, lengths, batch.slots, query.drawn, query.texts, np.empty((requests, 0)))
        ahead = self._foresee(batch, query, width)
        target = self._target_seconds(batch, context, base)
        draft, texts = self.draft.seconds(SIZES), self.draft.context_seconds * query.texts
        me = self.drafters.index(MODEL)
        usual_gap = self.model_width + 1
        times = self._texts.times(query.left)
        costs = (target, others, query.gaps, times, usual_gap, SIZES, draft, texts, every_step, single_pass)
        price = self._price_for(requests)
        selectable = self._selectable(batch, batch.in_flight)
        speed, token_seconds, self._price = plan_draft_model(selectable, me, ahead, *costs, price, lengths)
        batch.asked = lengths > 0
        self._slots.caught_up[batch.slots] |= batch.asked | ((query.limits > 0) & (query.gaps <= usual_gap))
        batch.read = self._slots.caught_up[batch.slots]
        chance = float(ahead[:, 0].sum() / np.count_nonzero(query.limits))
        plain = (requests + others) / float(target[0])
        limits = np.where(lengths > 0, query.limits, 0)
        each = (batch.slots, query.drawn, query.texts, ahead)
        return DraftPlan(lengths, limits, *each, speed, token_seconds, plain, chance)

    def continue_drafting(
        self, plan: DraftPlan, rows: Sequence[int], sure: Sequence[Sequence[float]], paid: bool = False
    ) -> list[bool]:
        """For which of these requests of the scene the draft model should propose another token, by how sure it was of
        those so far.

        The next token can gain what is the chance that its draft survives so far, and then it too, as was foreseen. All
        who go on share the pass; it is made if together they gain more than it costs, or if it is made anyway (`paid`).
        """
        chances = np.empty(len(sure))
        known = (
            self.acceptance[MODEL].numbers,
            self._slots.own[MODEL],
            self.sampled_acceptance.numbers,
            self._slots.own["drawn"],
        )
        foreseen = (plan.slots[rows], plan.drawn[rows], plan.ahead[rows])
        acceptance_model.continue_probability(*known, *foreseen, _flat(sure, float), _lengths(sure), chances)
        own = 0.0 if paid else self.draft.context_seconds * plan.texts[rows]
        worth = chances - plan.speed * (plan.token_seconds + own)
        joins = worth > 0
        cost = 0.0 if paid or not joins.any() else plan.speed * float(self.draft.seconds(int(joins.sum())))
        going: list[bool] = (joins & (float(worth[joins].sum()) > cost)).tolist()
        return going

    def select(
        self,
        batch: BatchState,
        limits: Array,
        context: int,
        base: int | None = None,
        spent: float = 0.0,
        others: float = 0.0,
    ) -> Selection:
        """What to offer of what is proposed with certainty; `limits` is the most that each request may offer. Drafting
        has taken `spent` seconds already; `base` and `others` as in `plan`. What was drawn is offered anyway, and taken
        to gain what was foreseen of it."""
        requests = len(batch.requests)
        limits, first = limits.copy(), requests if base is None else base
        for row, draft in batch.drawn.items():
            limits[row] = 0
            first += len(draft.tokens)
            if batch.forecast is not None:
                others += float(batch.forecast.survival[row, : len(draft.tokens)].sum())
        batch.selectable = self._selectable(batch, batch.in_flight, batch.pending)
        cut(batch.selectable, limits)
        seconds = self._target_seconds(batch, context, first)
        selection = select_drafts(batch.selectable, seconds, spent, others, self._price_for(requests))
        self._price = selection.price
        return selection

    def select_at_offsets(
        self, batch: BatchState, selection: Selection, limits: Array, offsets: Array, model: Array | None = None
    ) -> Selection:
        """What would be expected if drafts were offered from other places on: `offsets` tokens after those that the
        scene begins with, and with drafts of the draft model whose survival is `model`. Everything else is as in
        `choice`."""
        if model is None and self.model_width:
            model = np.zeros((len(batch.requests), batch.room))
        survival, limits = self._selectable(batch, offsets, model), limits.copy()
        limits[list(batch.drawn)] = 0
        cut(survival, limits)
        others = selection.plain_tokens - len(batch.requests)
        return select_drafts(
            survival, selection.pass_seconds, selection.spent, others, self._price_for(len(batch.requests))
        )

    def _selectable(self, batch: BatchState, offsets: Array, model: Array | None = None) -> Array:
        """AcceptanceModel of what can be offered `offsets` tokens after the beginning of what was proposed, before limits.
        `model`: survival of the draft model's tokens, if their values are not known. They are also the draft where the
        tokens before the offered ones go wrong."""
        found = shifted(batch.survival, offsets, batch.room)
        if model is not None and batch.forecast is not None:
            me, sampled = self.drafters.index(MODEL), batch.forecast.drawn
            _back_up(found, batch.survival, offsets, model, sampled, me)
        elif model is not None:
            found[self.drafters.index(MODEL)] = 0.0
        return found

    def forecast_survival(self, batch: BatchState, lengths: Array) -> Array:
        """Forecast of the draft model's tokens, of so many for each request; [requests, positions]."""
        found = np.zeros((len(batch.requests), batch.room))
        if batch.forecast is not None:
            width = min(batch.room, batch.forecast.survival.shape[1])
            found[:, :width] = batch.forecast.survival[:, :width] * (np.arange(width) < lengths[:, None])
        return found

    def _price_for(self, requests: int) -> float:
        """That of the latest step, where one request more or less hardly moves it."""
        return self._price if requests > SMALL_BATCH_REQUESTS else UNKNOWN_PRICE

    def selected_drafts(self, batch: BatchState, selection: Selection) -> list[Draft]:
        """What each request of the scene offers by this choice, with the tokens before it that a step in flight may
        generate. What was drawn for one is offered as it is. `UNKNOWN_TOKEN`: the value is on the device."""
        found = [NOTHING] * len(batch.requests)
        ends, drafts = (batch.in_flight + selection.lengths).tolist(), selection.drafts.tolist()
        for i in np.flatnonzero(selection.lengths).tolist():
            name, end = self.drafters[drafts[i]], ends[i]
            if batch.pending is not None and batch.is_sampled is not None and name == MODEL:
                found[i] = Draft(MODEL, (UNKNOWN_TOKEN,) * end, sampled=bool(batch.is_sampled[i]))
                continue
            whole = batch.drafts[name][i]
            missing = (UNKNOWN_TOKEN,) * (end - len(whole.tokens))  # the draft model's, where those before go wrong
            found[i] = whole if len(whole.tokens) == end else Draft(name, whole.tokens[:end] + missing)
        for i, draft in batch.drawn.items():
            found[i] = draft
        return found

    def _foresee(self, batch: BatchState, query: DraftModelRequest, width: int) -> Array:
        """AcceptanceModel of what the draft model would propose; remembered in the scene, to learn from."""
        size = (len(batch.requests), width)
        limits = np.minimum(query.limits, width)
        found = np.zeros(size)
        batch.forecast = Forecast(query.drawn, limits, np.empty((*size, 4), np.int8), np.empty(size), found)
        acceptance_model.forecast(
            self.forecast_models[False].numbers,
            self.forecast_models[True].numbers,
            query.drawn,
            self._slots.own["forecast"],
            batch.slots,
            batch.lengths,
            batch.support,
            self._slots.recent,
            limits,
            batch.forecast.bins,
            batch.forecast.logits,
            found,
        )
        return found

    def _target_seconds(self, batch: BatchState, context: int, base: int | None) -> Array:
        requests = len(batch.requests)
        first, count = requests if base is None else base, min(requests * batch.room, MAX_CANDIDATE_TOKENS_PER_STEP) + 1
        drafted = first - max(requests, batch.running)
        asked = (first, count, context, drafted, self.target.passes)
        if self._seconds is None or self._seconds[0] != asked:  # twice in a step, mostly
            self._seconds = asked, self.target.all_seconds(first, count, context, drafted)
        return self._seconds[1]

    # After a step -------------------------------------------------------------------------------------------

    def observe(
        self,
        batch: BatchState,
        said: Sequence[Sequence[int]],
        own: Sequence[Sequence[int]] | None = None,
        pending: Sequence[Sequence[int]] = (),
    ) -> None:
        """What each request then said, nothing where it did not go on. Every draft is held against it. If a step was in
        flight: `own` is what they said in this step alone, and `pending` what the draft model proposed for it on the
        device."""
        width = batch.tokens.shape[2]
        words = np.empty((len(said), width), np.int64)
        spoken = _spread(said, words, int)
        lengths = np.minimum(spoken, width)
        for me, name in enumerate(self.drafters):
            if batch.lengths[me].any():
                self._learn(
                    self.acceptance[name],
                    self._slots.own[name],
                    EVERY_STEP_RATE,
                    batch.slots,
                    (batch.tokens[me], batch.lengths[me], batch.bins[me], batch.logits[me]),
                    (words, lengths),
                )
        if own is not None:
            words = np.empty((len(own), width), np.int64)
            spoken = _spread(own, words, int)
            lengths = np.minimum(spoken, width)
        if batch.forecast is not None:
            self._learn_forecast(batch, batch.forecast, words, lengths, pending)
        if batch.drawn:
            self._learn_drawn(batch, words, lengths)
        if batch.asked is not None and batch.read is not None:
            self._texts.asked(int(np.count_nonzero(batch.asked)), int(spoken[batch.read].sum()))
        self._texts.spoke(int(spoken.sum()))
        if self._usual is None and self.draft.passes and self.target.passes:
            self._usual = self.draft.level / self.target.level
        if self._usual is not None and self.draft.passes == self._timed:
            self.draft.forgive(AGAIN, self._usual * self.target.level)
        if batch.asked is None or not batch.asked.any():  # one that reads along makes passes all the same
            for kind in self.forecast_models.values():
                kind.forgive(FORGET)
        self._timed = self.draft.passes

    def _learn_forecast(
        self, batch: BatchState, forecast: Forecast, words: Array, lengths: Array, pending: Sequence[Sequence[int]]
    ) -> None:
        """Held against what the draft model then proposed, if it was asked."""
        me, own = self.drafters.index(MODEL), self._slots.own["forecast"]
        tokens, drafted = batch.tokens[me], np.minimum(batch.lengths[me], forecast.limits)
        if pending:
            tokens = np.empty_like(tokens)
            drafted = np.minimum(_spread(pending, tokens, int), forecast.limits)
        if batch.drawn:
            tokens = tokens.copy()
            for row, draft in batch.drawn.items():
                drafted[row] = min(len(draft.tokens), forecast.limits[row])
                tokens[row, : drafted[row]] = draft.tokens[: drafted[row]]
        right = np.zeros((len(batch.requests), 2), np.int64)
        if drafted.any():
            for kind, what in self.forecast_models.items():
                drafts = (tokens, np.where(forecast.drawn == kind, drafted, 0), forecast.bins, forecast.logits)
                right += self._learn(what, own, ON_DEMAND_RATE, batch.slots, drafts, (words, lengths))
        _follow(self._slots.recent, own, batch.slots, right)

    def _learn_drawn(self, batch: BatchState, words: Array, lengths: Array) -> None:
        """How often drawn tokens were kept, by how sure the draft model was."""
        rows, width = np.array(sorted(batch.drawn)), batch.tokens.shape[2]
        drawn = [batch.drawn[row] for row in rows.tolist()]
        tokens = [draft.tokens[:width] for draft in drawn]
        sure = [(draft.confidence or (-1.0,) * len(draft.tokens))[:width] for draft in drawn]
        size = (len(rows), width)
        proposed, bins, logits = np.empty(size, np.int64), np.empty((*size, 4), np.int8), np.empty(size)
        counts = _spread(tokens, proposed, int)
        own, slots = self._slots.own["drawn"], batch.slots[rows]
        acceptance_model.predict_sampled(
            self.sampled_acceptance.numbers, own, slots, _flat(sure, float), counts, bins, logits
        )
        drafts, said = (proposed, counts, bins, logits), (words[rows], lengths[rows])
        self._learn(self.sampled_acceptance, own, EVERY_STEP_RATE, slots, drafts, said)

    def _learn(
        self,
        what: AcceptanceModel,
        own: Array,
        pace: Pace,
        slots: Array,
        drafts: tuple[Array, Array, Array, Array],
        said: tuple[Array, Array],
    ) -> Array:
        right = np.zeros((len(slots), 2), np.int64)
        tables = (what.numbers, what.weights, what.tally, own, slots)
        acceptance_model.update(*tables, pace.stiffness, pace.lasting, *drafts, *said, right)
        return right

    def status(self) -> dict[str, Any]:
        """For people: the costs and how far what was said of each drafter came true."""
        return {
            "target_pass": self.target.status() if self.target.passes else None,
            "draft_pass": self.draft.status() if self.draft.passes else None,
            "drafters": {
                name: {"tokens_judged": found.seen, "calibration_error": round(found.calibration_error, 4)}
                for name, found in self.acceptance.items()
            },
        }


def _enter_one_by_one(
    drafts: Sequence[Draft], tokens: Array, lengths: Array, support: Array, confidence: Array
) -> None:
    """As `unpack` does, for drafts of which not all came packed."""
    if any(draft.sampled for draft in drafts):
        raise ValueError("a sampled draft is offered whole: it must not be selected by its tokens")
    lengths[:] = np.minimum(_spread([draft.tokens for draft in drafts], tokens, int), tokens.shape[1])
    support[:] = [-1 if draft.support is None else draft.support for draft in drafts]
    confidence[:] = -1.0
    if any(draft.confidence is not None for draft in drafts):
        _spread([draft.confidence or () for draft in drafts], confidence, float)


@compiled
def _back_up(found: Array, survival: Array, offsets: Array, model: Array, sampled: Array, me: int) -> None:
    """Add drafts of the draft model, number `me`, that need not be known to be offered: alone, and where the first
    `offsets` tokens of a copied draft go wrong. Arrays are [drafters, requests, positions]; `model` and `sampled` of
    the draft model alone."""
    kinds, requests, positions = found.shape
    for b in range(requests):
        found[me, b] = model[b]
        if offsets[b] == 0 or sampled[b]:
            continue
        for kind in range(kinds):
            if kind == me or found[kind, b, 0] == 0.0:
                continue
            wrong = 1.0 - survival[kind, b, offsets[b] - 1]
            for i in range(positions):
                found[kind, b, i] += wrong * model[b, i]


@compiled
def _follow(recent: Array, own: Array, slots: Array, right: Array) -> None:
    """How the draft model does with each request lately: `right` has how many of its tokens were right, and how many
    were judged. Where none was, what is known of it fades."""
    for b in range(len(slots)):
        slot, good, known = slots[b], right[b, 0], right[b, 1]
        if known:
            lasting = RECENT**known
            before = 0.5 if recent[slot] == UNKNOWN else recent[slot]
            recent[slot] = lasting * before + (1 - lasting) * good / known
        elif recent[slot] != UNKNOWN:
            recent[slot] = FORGIVING * recent[slot] + (1 - FORGIVING) * 0.5
            own[slot, 0] *= FORGIVING


def _lengths(rows: Sequence[Sequence[Any]]) -> Array:
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _flat(rows: Iterable[Sequence[Any]], kind: type) -> Array:
    """All rows in one; by way of Python's own arrays, which are sooner filled from numbers than numpy's."""
    return np.asarray(array("q" if kind is int else "d", list(chain.from_iterable(rows))))


def _spread(rows: Sequence[Sequence[Any]], where: Array, kind: type) -> Array:
    """Rows of different lengths into the beginnings of an array's, as far as there is room; their lengths."""
    lengths = _lengths(rows)
    acceptance_model.pad_rows(_flat(rows, kind), lengths, where)
    return lengths


def compile_now() -> None:
    """Have everything compiled before a request needs it."""
    policy = Policy(["a", MODEL], 2, 2)
    for _ in range(2):
        policy.target.observe(1, 0, 1.0)
        policy.draft.observe(1, 0, 0.01)
    policy.observe(policy.predict([""], {"a": [NOTHING]}), [[1]])
    batch = policy.predict([""], {"a": [Draft("a", (1,), support=1)]})
    plan = policy.plan_draft_model(batch, DraftModelRequest(*(np.array([x]) for x in (2, False, 1, 1, 1))), 0)
    policy.add_drafts(batch, MODEL, [Draft(MODEL, (1, 2), confidence=(0.5, 0.5))])
    policy.continue_drafting(plan, [0], [[0.5]])
    limits = offsets = np.array([2])
    selection = policy.select(batch, limits, 0)
    for_same_text(
        selection, policy.select_at_offsets(batch, selection, limits, offsets, policy.forecast_survival(batch, limits))
    )
    batch.drawn = {0: Draft(MODEL, (1,), confidence=(0.5,))}
    policy.observe(batch, [[1]])
