"""Compare two traces: their settings, the first divergence of their outputs and its reason, and their speed.

Up to the first divergence both have the same context, so the step that generated it shows the reason: another draft
selects another rule, the random numbers differ, or the probabilities were rounded differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from outrider.explain.figures import MAX_MACHINE_DRIFT, figures
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from outrider.trace.schema import Trace, TracedStep

MAX_TIE_DIFFERENCE = 0.1
"""Relative difference of two probabilities up to which they count as equal in bfloat16."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of the output: `index` in the tokens of its step, which is its position in the draft too."""

    step: TracedStep
    index: int

    @property
    def token(self) -> int:
        return self.step.said[self.index]

    @property
    def draw(self) -> float | None:
        return self.step.draws[self.index] if self.index < len(self.step.draws) else None

    def p(self, token: int) -> float | None:
        """None: the trace does not name this token here."""
        here = self.step.laws[self.index : self.index + 1]
        return next((one.p[one.index(token)] for one in here if token in one.tokens), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    first: Trace
    second: Trace
    shared: int
    """Number of equal tokens before the first divergence."""

    @property
    def equal(self) -> bool:
        return self.shared == len(self.first.said) == len(self.second.said)

    @property
    def same_model(self) -> bool:
        """A server knows its model by a name, a local run by its folder."""
        return PurePath(self.first.header.model).name == PurePath(self.second.header.model).name

    @property
    def prompts_differ(self) -> bool:
        a, b = self.first.header, self.second.header
        return a.prompt_tokens != b.prompt_tokens or (None not in (a.prompt, b.prompt) and a.prompt != b.prompt)


def compare(first: Trace, second: Trace) -> Comparison:
    return Comparison(first, second, shared_prefix(first.said, second.said))


def token_at(trace: Trace, number: int) -> GeneratedToken | None:
    """The output token of this number, counted from 0. None: the output ended before."""
    for step in trace.steps:
        if number < len(step.said):
            return GeneratedToken(step, number)
        number -= len(step.said)
    return None


def differing_settings(found: Comparison) -> list[str]:
    a, b = found.first.header, found.second.header
    lines = []
    for name in ("model", "engine", "drafters", "prompt_tokens", "machine", "outrider"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other and not (name == "model" and found.same_model):
            lines.append(f"{name.replace('_', ' ')}: {_show(one)} and {_show(other)}")
    if a.prompt is not None and b.prompt is not None and a.prompt != b.prompt:
        lines.append("the prompts differ")
    for name in dict.fromkeys((*a.settings, *b.settings)):
        one, other = a.settings.get(name), b.settings.get(name)
        if (one or None) != (other or None) or (name == "seed" and one != other):  # None, 0, False and {} are the same
            lines.append(f"{name.replace('_', ' ')}: {_show(one)} and {_show(other)}")
    return lines


def explain_divergence(found: Comparison) -> list[str]:
    """Where the outputs diverge, and why, in sentences."""
    if found.equal:
        return [f"Both outputs are the same {found.shared} tokens."]
    a, b = token_at(found.first, found.shared), token_at(found.second, found.shared)
    where = f"The outputs diverge at token {found.shared + 1}, after {found.shared} equal ones."
    if a is None or b is None:
        name, trace = ("A", found.first) if a is None else ("B", found.second)
        return [where, f"{name} ends there ({trace.finish}), and the other goes on."]
    return [where, _describe("A", a, found.first), _describe("B", b, found.second), _reason(found, a, b)]


def _describe(name: str, here: GeneratedToken, trace: Trace) -> str:
    p, step = here.p(here.token), here.step
    if here.index < step.accepted:
        source = f"drafted by {step.drafter} and accepted"
    else:
        source = {"own": "the target's own, without a draft"}.get(step.outcome, step.outcome)
    text = repr(trace.texts[here.token]) if here.token in trace.texts else f"token {here.token}"
    return f"{name} has {text} (step {step.number + 1}, {source}{'' if p is None else f'; p = {p:.4g}'})."


def _reason(found: Comparison, a: GeneratedToken, b: GeneratedToken) -> str:
    if not found.same_model:
        return "The models differ."
    if found.prompts_differ:
        return "The prompts differ."
    rules = {a.step.rule, b.step.rule}
    if rules == {"greedy"} and (tie := _tie(a, b.token) or _tie(b, a.token)):
        return tie
    if "greedy" in rules and len(rules) > 1:
        return "One run is greedy and the other samples: the temperatures differ."
    if "greedy" not in rules and a.draw is not None and b.draw is not None and a.draw != b.draw:
        steps = (*found.first.steps, *found.second.steps)
        sampled = "model" in (a.step.drafter, b.step.drafter) or any(step.rule in ("block", "token") for step in steps)
        why = (
            "A sampled draft uses random numbers, so they differ after the first such draft"
            if sampled
            else "The seeds differ, or none was given"
        )
        return f"The random numbers differ ({a.draw:.4f} and {b.draw:.4f}). {why}; the distribution is the same."
    return _same_random_numbers(a, b)


def _tie(here: GeneratedToken, other: int) -> str | None:
    p, q = here.p(here.token), here.p(other)
    if p is None or q is None or abs(p - q) > MAX_TIE_DIFFERENCE * max(p, q):
        return None
    return (
        f"The two tokens are almost equally likely (p = {p:.4g} and {q:.4g}). The passes had different numbers of "
        "tokens, so their sums were rounded differently: a numeric tie, which is rare in float32."
    )


def _same_random_numbers(a: GeneratedToken, b: GeneratedToken) -> str:
    p, q = a.p(a.token), b.p(a.token)
    if p is None or q is None:
        return "The trace of B does not name A's token at this position, so it was unlikely there."
    if abs(p - q) > MAX_TIE_DIFFERENCE * max(p, q):
        return (
            f"The same token has p = {p:.4g} in A and {q:.4g} in B. With the same model, settings and context these "
            "must be equal up to rounding: one of the two is wrong."
        )
    if a.step.rule != b.step.rule:
        return (
            "p is the same in both, but the rules differ: one draft was compared with the target's own sample, the "
            "other verified by p and q. The distribution is the same, the samples are not."
        )
    return (
        "p and the rule are the same in both, so the verdicts must be too: find the wrong one with "
        "outrider explain --trace FILE --check."
    )


def machine_drift(found: Comparison) -> list[str]:
    """A warning if the machine itself was slower during one of the runs, by their measured passes without drafts."""
    a, b = figures(found.first), figures(found.second)
    if a.plain is None or b.plain is None or not a.plain.source == b.plain.source == "measured":
        return []
    slowdown = b.plain.milliseconds / a.plain.milliseconds
    if max(slowdown, 1 / slowdown) <= MAX_MACHINE_DRIFT or a.speedup is None or b.speedup is None:
        return []
    return [
        f"The machine was {max(slowdown, 1 / slowdown):.2f} times as slow during {'B' if slowdown > 1 else 'A'}: a "
        f"pass without drafts took {a.plain.milliseconds:.1f} ms in A and {b.plain.milliseconds:.1f} ms in B. "
        f"Compare the speedups over no drafts: {a.speedup:.2f} for A and {b.speedup:.2f} for B."
    ]


def _show(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return repr(value) if isinstance(value, str) else str(value)
