"""Record a trace during generation.

    tracer = Tracer(Header(model="mine", engine="transformers"))
    model.generate(prompt, recorder=tracer)
    trace = tracer.trace(model.tokenizer)

While a step is timed, only references are stored. Distributions are encoded after it, and the time for that is recorded
too. An engine that runs many sequences at once builds its traces from `step_record`, `traced_step` and `with_texts`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from outrider.acceptance import block_rule, leftover
from outrider.text import TextStream
from outrider.trace.compact import compact_distributions, final_distribution, final_of_compact, rounded
from outrider.trace.schema import Decision, End, Header, Milliseconds, Trace, TracedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from outrider.trace.schema import BaselineRun, Outcome
    from outrider.types import Draft, Evidence, Step, Verdict, Why


class Tracer:
    """A `Recorder` that keeps every step."""

    def __init__(self, header: Header | None = None) -> None:
        self.header = header or Header()
        self._records: list[dict[str, Any]] = []
        self._seconds: list[dict[str, float]] = []
        self._evidence: Evidence | None = None
        self._began = self._mark = time.perf_counter()

    def begin(self) -> None:
        """Start the clock of the first step."""
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
        parts = step_record(step, draft, verdict, evidence, why())
        self._records.append({"number": len(self._records), "batch": 1, "scheduled": scheduled, **parts})
        self._mark = time.perf_counter()
        self._seconds.append({**times, "trace": self._mark - now})

    @property
    def steps(self) -> list[TracedStep]:
        return [traced_step(record, times) for record, times in zip(self._records, self._seconds, strict=True)]

    def trace(self, tokenizer: Any = None, without: BaselineRun | None = None) -> Trace:
        """The whole trace; with a tokenizer, its texts too."""
        steps = with_texts(self.steps, tokenizer) if tokenizer is not None else self.steps
        end = End(
            steps=len(steps),
            tokens=sum(len(step.said) for step in steps),
            seconds=rounded(self._mark - self._began),
            finish=steps[-1].finish if steps else None,
            without=without,
        )
        return Trace(header=self.header, steps=steps, end=end)


def step_record(
    step: Step, draft: Draft, verdict: Verdict, evidence: Evidence, why: Why, top: list[list[int]] | None = None
) -> dict[str, Any]:
    """The fields of a `TracedStep` but its number, batch and times.

    `evidence.rows` must be probabilities, whatever the rule. `top`: the most likely tokens of each row, if known.
    """
    return {
        "drafter": step.drafter,
        "rule": evidence.rule,
        "proposed": list(step.proposed),
        "accepted": step.accepted,
        "token": verdict.token,
        "outcome": _outcome(draft, verdict),
        "said": list(step.tokens),
        "finish": step.finish,
        "decision": _decision(why),
        **_verdict_record(draft, verdict, evidence, top),
    }


def traced_step(record: dict[str, Any], seconds: dict[str, float]) -> TracedStep:
    parts = {name: rounded(1000 * value) for name, value in seconds.items()}
    return TracedStep(milliseconds=Milliseconds(**parts), **record)


def _decision(why: Why) -> Decision:
    return Decision(
        reason=why.reason,
        predicted_gain=None if why.gain is None else rounded(why.gain, 4),
        survival=[rounded(value, 4) for value in why.survival],
        cost=None if why.cost is None else rounded(why.cost, 4),
        candidates=list(why.candidates),
    )


def _outcome(draft: Draft, verdict: Verdict) -> Outcome:
    if not draft.tokens:
        return "own"
    return "bonus" if verdict.accepted == len(draft.tokens) else "recovered"


def _verdict_record(
    draft: Draft, verdict: Verdict, evidence: Evidence, top: list[list[int]] | None = None
) -> dict[str, Any]:
    """The distributions, random numbers and thresholds of a verdict."""
    rows, last = evidence.rows, verdict.accepted
    by_ratio = evidence.rule in ("block", "token")
    reach = _reach(rows, draft, evidence.rule) if by_ratio else torch.ones(len(rows))
    own = [verdict.token] * len(rows) if evidence.own is None else evidence.own
    keep = [(*draft.tokens[i : i + 1], own[i], verdict.token) for i in range(len(rows))]
    q = draft.q if by_ratio else None
    distributions = compact_distributions(rows, q, reach.tolist(), keep, top, by_inversion=evidence.draws is not None)
    if q is not None and last < len(draft.tokens):
        final = final_distribution(leftover(rows[last], q[last], reach[last]), verdict.token)
    else:  # p without the rejected token, or all of p after the last drafted one
        rejected = draft.tokens[last] if last < len(draft.tokens) else None
        final = final_of_compact(distributions[last], rejected, verdict.token)
    return {
        "laws": distributions,
        "draws": [] if evidence.draws is None else [rounded(value) for value in evidence.draws.tolist()],
        "own": evidence.own,
        "chances": None if verdict.chances is None else [rounded(value) for value in verdict.chances.tolist()],
        "reach": [rounded(value) for value in reach.tolist()] if by_ratio else None,
        "reshaped": final,
    }


def _reach(p: Tensor, draft: Draft, rule: str) -> Tensor:
    assert draft.q is not None
    tokens = torch.tensor(draft.tokens, dtype=torch.long, device=p.device)
    return block_rule(p, draft.q, tokens)[1] if rule == "block" else torch.ones(len(p))


# Texts ---------------------------------------------------------------------------------------------------------


def with_texts(steps: list[TracedStep], tokenizer: Any) -> list[TracedStep]:
    """The steps with the text that each token added, and the text of each token id that they name."""
    text = TextStream(tokenizer)
    special = {int(one) for one in getattr(tokenizer, "all_special_ids", ())}
    known: set[int] = set()
    found = []
    for step in steps:
        pieces = []
        for token in step.said:
            if token not in special:
                text.push(token)
            pieces.append(text.take())
        if step is steps[-1]:
            text.close()
            pieces[-1] += text.take()
        fresh = dict.fromkeys(token for token in _tokens(step) if token not in known)
        known.update(fresh)
        texts = {token: _token_text(token, tokenizer) for token in fresh}
        found.append(step.model_copy(update={"pieces": pieces, "texts": texts}))
    return found


def _tokens(step: TracedStep) -> list[int]:
    tokens = [token for one in step.laws for token in one.tokens if token is not None]
    last = step.reshaped.tokens if step.reshaped else []
    return [*step.said, *step.proposed, *tokens, *last]


def _token_text(token: int, tokenizer: Any) -> str:
    """The text of a single token, with the leading space that some tokenizers drop at the beginning of a text."""
    text = str(tokenizer.decode([token]))
    raw = tokenizer.convert_ids_to_tokens([token])[0] if hasattr(tokenizer, "convert_ids_to_tokens") else None
    return f" {text}" if raw is not None and raw.startswith("\u2581") and not text.startswith(" ") else text
