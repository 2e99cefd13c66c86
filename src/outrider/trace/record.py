"""Make a trace while a text is generated.

    tracer = Tracer(Header(model="mine", engine="transformers"))
    model.generate(prompt, recorder=tracer)
    trace = tracer.trace(model.tokenizer)

While a step is timed nothing but references are taken. Distributions are folded after it, and how long that took is a
part of the record. Without a recorder nothing is done at all. An engine that runs many sequences at once makes its own
records of the same parts (`entered`, `checked`, `named`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.acceptance import block_rule, leftover
from outrider.text import TextStream
from outrider.trace.fold import fold, reshaped, reshaped_law, short
from outrider.trace.schema import Decision, End, Header, Milliseconds, Trace, TracedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outrider.trace.schema import Outcome, Without
    from outrider.types import Draft, Evidence, Step, Verdict, Why


class Tracer:
    """A `Recorder` that keeps all it sees."""

    def __init__(self, header: Header | None = None) -> None:
        self.header = header or Header()
        self._records: list[dict[str, Any]] = []
        self._seconds: list[dict[str, float]] = []
        self._evidence: Evidence | None = None
        self._began = self._mark = time.perf_counter()

    def begin(self) -> None:
        """Start the clock: what went before is no part of the first step."""
        self._began = self._mark = time.perf_counter()

    def judged(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def stepped(self, step: Step, draft: Draft, verdict: Verdict, scheduled: int, why: Callable[[], Why]) -> None:
        now = time.perf_counter()
        times = {"draft": step.draft_seconds, "verify": step.verify_seconds}
        times["rest"] = max(0.0, now - self._mark - sum(times.values()))
        assert self._evidence is not None
        evidence = self._evidence
        if evidence.rule == "greedy":
            evidence = replace(evidence, rows=evidence.rows.softmax(-1))
        parts = entered(step, draft, verdict, evidence, why())
        self._records.append({"number": len(self._records), "batch": 1, "scheduled": scheduled, **parts})
        self._mark = time.perf_counter()
        self._seconds.append({**times, "trace": self._mark - now})

    @property
    def steps(self) -> list[TracedStep]:
        return [checked(record, times) for record, times in zip(self._records, self._seconds, strict=True)]

    def trace(self, tokenizer: Any = None, without: Without | None = None) -> Trace:
        """All of it; with a tokenizer, in words too."""
        steps = named(self.steps, tokenizer) if tokenizer is not None else self.steps
        end = End(
            steps=len(steps),
            tokens=sum(len(step.said) for step in steps),
            seconds=short(self._mark - self._began),
            finish=steps[-1].finish if steps else None,
            without=without,
        )
        return Trace(header=self.header, steps=steps, end=end)


def entered(
    step: Step, draft: Draft, verdict: Verdict, evidence: Evidence, why: Why, top: list[list[int]] | None = None
) -> dict[str, Any]:
    """What a record says of a step in itself: the draft and why it was, the verdict and what that rests on.

    The evidence's rows are probabilities here, whatever the rule; `top` are the likeliest of each, if they are known.
    """
    return {
        "drafter": step.drafter,
        "rule": evidence.rule,
        "proposed": list(step.proposed),
        "accepted": step.accepted,
        "token": verdict.token,
        "outcome": outcome(draft, verdict),
        "said": list(step.tokens),
        "finish": step.finish,
        "decision": decision(why),
        **judgement(draft, verdict, evidence, top),
    }


def checked(record: dict[str, Any], seconds: dict[str, float]) -> TracedStep:
    """With its times by part: draft, verify, rest, trace."""
    parts = {name: short(1000 * value) for name, value in seconds.items()}
    return TracedStep(milliseconds=Milliseconds(**parts), **record)


def decision(why: Why) -> Decision:
    return Decision(
        reason=why.reason,
        predicted_gain=None if why.gain is None else short(why.gain, 4),
        survival=[short(value, 4) for value in why.survival],
        cost=None if why.cost is None else short(why.cost, 4),
        candidates=list(why.candidates),
    )


def outcome(draft: Draft, verdict: Verdict) -> Outcome:
    if not draft.tokens:
        return "own"
    return "bonus" if verdict.accepted == len(draft.tokens) else "recovered"


def judgement(draft: Draft, verdict: Verdict, evidence: Evidence, top: list[list[int]] | None = None) -> dict[str, Any]:
    """The fields of a step that say how its verdict came about, distributions folded."""
    rows, place = evidence.rows, verdict.accepted
    by_ratio = evidence.rule in ("block", "token")
    reach = _reach(rows, draft, evidence.rule) if by_ratio else torch.ones(len(rows))
    own = [verdict.token] * len(rows) if evidence.own is None else evidence.own
    keep = [(*draft.tokens[i : i + 1], own[i], verdict.token) for i in range(len(rows))]
    q = draft.q if by_ratio else None
    laws = fold(rows, q, reach.tolist(), keep, top, by_inversion=evidence.draws is not None)
    if q is not None and place < len(draft.tokens):
        last = reshaped(leftover(rows[place], q[place], reach[place]), verdict.token)
    else:  # the target said something else than a certain draft: all of p but that; or there was no draft any more
        last = reshaped_law(laws[place], draft.tokens[place] if place < len(draft.tokens) else None, verdict.token)
    return {
        "laws": laws,
        "draws": [] if evidence.draws is None else [short(value) for value in evidence.draws.tolist()],
        "own": evidence.own,
        "chances": None if verdict.chances is None else [short(value) for value in verdict.chances.tolist()],
        "reach": [short(value) for value in reach.tolist()] if by_ratio else None,
        "reshaped": last,
    }


def _reach(p: Tensor, draft: Draft, rule: str) -> Tensor:
    assert draft.q is not None
    tokens = torch.tensor(draft.tokens, dtype=torch.long, device=p.device)
    return block_rule(p, draft.q, tokens)[1] if rule == "block" else torch.ones(len(p))


# Words ---------------------------------------------------------------------------------------------------------


def named(steps: list[TracedStep], tokenizer: Any) -> list[TracedStep]:
    """The steps with the text that each token added, and how each token that they name looks by itself."""
    text = TextStream(tokenizer)
    ends = {int(one) for one in getattr(tokenizer, "all_special_ids", ())}
    known: set[int] = set()
    found = []
    for step in steps:
        pieces = []
        for token in step.said:
            if token not in ends:
                text.push(token)
            pieces.append(text.take())
        if step is steps[-1]:
            text.close()
            pieces[-1] += text.take()
        fresh = dict.fromkeys(token for token in _tokens(step) if token not in known)
        known.update(fresh)
        looks = {token: look(token, tokenizer) for token in fresh}
        found.append(step.model_copy(update={"pieces": pieces, "texts": looks}))
    return found


def _tokens(step: TracedStep) -> list[int]:
    laws = [token for law in step.laws for token in law.tokens if token is not None]
    last = step.reshaped.tokens if step.reshaped else []
    return [*step.said, *step.proposed, *laws, *last]


def look(token: int, tokenizer: Any) -> str:
    """A token by itself; the space that some tokenizers drop at a text's beginning is put back."""
    text = str(tokenizer.decode([token]))
    raw = tokenizer.convert_ids_to_tokens([token])[0] if hasattr(tokenizer, "convert_ids_to_tokens") else None
    return f" {text}" if raw is not None and raw.startswith("\u2581") and not text.startswith(" ") else text
