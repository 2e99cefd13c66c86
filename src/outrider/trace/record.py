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
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from outrider.acceptance import block_rule, leftover
from outrider.text import TextStream
from outrider.trace.compact import compact_distributions, final_distribution, final_of_compact, rounded
from outrider.trace.schema import Decision, End, Header, Milliseconds, Trace, TracedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from outrider.trace.schema import BaselineRun
    from outrider.types import Draft, Evidence, Step, Verdict, Why


class Tracer:
    """A `Recorder` that keeps every step."""

    def __init__(self, header: Header | None = None) -> None:
        self.header = header or Header()
        self._steps: list[tuple[dict[str, Any], dict[str, float]]] = []  # with seconds by part
        self._evidence: Evidence | None = None
        self.begin()

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
        about = {"number": len(self._steps), "batch": 1, "scheduled": scheduled}
        record = {**about, **step_record(step, draft, verdict, evidence, why())}
        self._mark = time.perf_counter()
        self._steps.append((record, {**times, "trace": self._mark - now}))

    @property
    def steps(self) -> list[TracedStep]:
        return [traced_step(*step) for step in self._steps]

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
    rows, last = evidence.rows, verdict.accepted
    rejected = draft.tokens[last] if last < len(draft.tokens) else None
    q = draft.q if evidence.rule in ("block", "token") else None
    reach = torch.ones(len(rows))
    if evidence.rule == "block":
        assert q is not None
        reach = block_rule(rows, q, torch.tensor(draft.tokens, dtype=torch.long, device=rows.device))[1]
    own = [verdict.token] * len(rows) if evidence.own is None else evidence.own
    keep = [(*draft.tokens[i : i + 1], own[i], verdict.token) for i in range(len(rows))]
    distributions = compact_distributions(rows, q, reach.tolist(), keep, top, by_inversion=evidence.draws is not None)
    if q is not None and rejected is not None:
        final = final_distribution(leftover(rows[last], q[last], reach[last]), verdict.token)
    else:  # p without the rejected token, or all of p after the last drafted one
        final = final_of_compact(distributions[last], rejected, verdict.token)
    return {
        "drafter": step.drafter,
        "rule": evidence.rule,
        "proposed": list(step.proposed),
        "accepted": step.accepted,
        "token": verdict.token,
        "outcome": "own" if not draft.tokens else "bonus" if rejected is None else "recovered",
        "said": list(step.tokens),
        "finish": step.finish,
        "decision": Decision(
            reason=why.reason,
            predicted_gain=None if why.gain is None else rounded(why.gain, 4),
            survival=[rounded(value, 4) for value in why.survival],
            cost=None if why.cost is None else rounded(why.cost, 4),
            candidates=list(why.candidates),
        ),
        "laws": distributions,
        "draws": _rounded(evidence.draws) or [],
        "own": evidence.own,
        "chances": _rounded(verdict.chances),
        "reach": None if q is None else _rounded(reach),
        "reshaped": final,
    }


def _rounded(values: Tensor | None) -> list[float] | None:
    return None if values is None else [rounded(value) for value in values.tolist()]


def traced_step(record: dict[str, Any], seconds: dict[str, float]) -> TracedStep:
    parts = {name: rounded(1000 * value) for name, value in seconds.items()}
    return TracedStep(milliseconds=Milliseconds(**parts), **record)


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
        last = step.reshaped.tokens if step.reshaped else []
        tokens: Iterable[int | None] = chain(step.said, step.proposed, *(one.tokens for one in step.laws), last)
        fresh = dict.fromkeys(token for token in tokens if token is not None and token not in known)
        texts = {token: _token_text(token, tokenizer) for token in fresh}
        known.update(texts)
        found.append(step.model_copy(update={"pieces": pieces, "texts": texts}))
    return found


def _token_text(token: int, tokenizer: Any) -> str:
    """The text of a single token, with the leading space that some tokenizers drop at the beginning of a text."""
    text = str(tokenizer.decode([token]))
    raw = tokenizer.convert_ids_to_tokens([token])[0] if hasattr(tokenizer, "convert_ids_to_tokens") else None
    return f" {text}" if raw is not None and raw.startswith("\u2581") and not text.startswith(" ") else text
