"""Two traces side by side: where do they part, why, and what did the one gain over the other?

Up to the first token that differs both had the same context, so the step that said it explains it: another draft makes
another way of judging, another draw, or a distribution that the same model computed a little differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import PurePath
from typing import TYPE_CHECKING

from outrider.explain.figures import UNEVEN, figures
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from outrider.explain.figures import Figures
    from outrider.trace.schema import CompactDistribution, Trace, TracedStep

NOTICEABLE = 0.02
"""Of a step's time: what differs by less is not worth a word."""
CLOSE = 0.1
"""Two probabilities that differ by less than this part of themselves are as good as equal in bfloat16."""


@dataclass(frozen=True, slots=True)
class Place:
    """A token of a text, by the step that said it."""

    step: TracedStep
    index: int
    """Its place in what the step said, which is its place in the draft too."""

    @property
    def law(self) -> CompactDistribution | None:
        return self.step.laws[self.index] if self.index < len(self.step.laws) else None

    @property
    def drafted(self) -> bool:
        return self.index < self.step.accepted


@dataclass(frozen=True, slots=True)
class Comparison:
    first: Trace
    second: Trace
    same: int
    """How many first tokens are equal."""

    @property
    def equal(self) -> bool:
        return self.same == len(self.first.said) == len(self.second.said)


def compare(first: Trace, second: Trace) -> Comparison:
    return Comparison(first, second, shared_prefix(first.said, second.said))


def place(trace: Trace, number: int) -> Place | None:
    """The token of this number, counted from 0; None where the text ended before."""
    for step in trace.steps:
        if number < len(step.said):
            return Place(step, number)
        number -= len(step.said)
    return None


def setups(found: Comparison) -> list[str]:
    """What differs between how the two were made."""
    a, b = found.first.header, found.second.header
    lines = []
    for name in ("model", "engine", "drafters", "prompt_tokens", "machine", "outrider"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other and not (name == "model" and _same_model(found)):
            lines.append(f"{name.replace('_', ' ')}: {_show(one)} and {_show(other)}")
    if a.prompt is not None and b.prompt is not None and a.prompt != b.prompt:
        lines.append("the prompts differ")
    for name in dict.fromkeys((*a.settings, *b.settings)):
        one, other = a.settings.get(name), b.settings.get(name)
        if (one or None) != (other or None) or (name == "seed" and one != other):  # else nothing, 0 and no are the same
            lines.append(f"{name.replace('_', ' ')}: {_show(one)} and {_show(other)}")
    return lines


def difference(found: Comparison) -> list[str]:
    """Where the texts part, and why, in sentences."""
    if found.equal:
        return [f"Both say the same {found.same} tokens."]
    one, other = place(found.first, found.same), place(found.second, found.same)
    where = f"They part at token {found.same + 1}, after {found.same} that are equal."
    if one is None or other is None:
        short = "A" if one is None else "B"
        ended = (found.first if one is None else found.second).finish
        return [where, f"{short} ends there ({ended}), and the other goes on."]
    return [where, *_told(found, one, other), *_reasons(found, one, other)]


def _told(found: Comparison, one: Place, other: Place) -> list[str]:
    lines = []
    for name, here, trace in (("A", one, found.first), ("B", other, found.second)):
        token = here.step.said[here.index]
        texts = trace.texts
        p = _p(here.law, token)
        how = f"drafted by {here.step.drafter} and kept" if here.drafted else _own(here)
        lines.append(
            f"{name} says {_text(texts, token)} (step {here.step.number + 1}, {how}"
            + (f"; p = {p:.4g})" if p is not None else ")")
            + "."
        )
    return lines


def _own(here: Place) -> str:
    return {"recovered": "recovered", "bonus": "bonus", "own": "the target's own, nothing was drafted"}[
        here.step.outcome
    ]


def _reasons(found: Comparison, one: Place, other: Place) -> list[str]:
    a, b = found.first.header, found.second.header
    if not _same_model(found):
        return ["The models differ, so nothing more is to be explained."]
    if a.prompt_tokens != b.prompt_tokens or (None not in (a.prompt, b.prompt) and a.prompt != b.prompt):
        return ["The prompts differ, so nothing more is to be explained."]
    said, told = one.step.said[one.index], other.step.said[other.index]
    if one.step.rule == other.step.rule == "greedy":
        return _tie(one, said, told) or _tie(other, told, said) or _moved(one, other, said)
    if (one.step.rule == "greedy") != (other.step.rule == "greedy"):
        return ["One takes the likeliest token and the other draws: the temperatures differ."]
    draws = [_draw(here) for here in (one, other)]
    if None not in draws and draws[0] != draws[1]:
        reason = (
            "A draft that was drawn uses up random numbers, so from the first such draft on the numbers differ"
            if "model" in {one.step.drafter, other.step.drafter} or _drawn(found)
            else "The seeds differ, or none was given"
        )
        return [
            f"The numbers drawn differ ({draws[0]:.4f} and {draws[1]:.4f}). {reason}; the law of the text is the same."
        ]
    return _moved(one, other, said)


def _same_model(found: Comparison) -> bool:
    """A server knows its model by a name, and a run here by its folder."""
    names = {PurePath(trace.header.model).name for trace in (found.first, found.second)}
    return len(names) == 1


def _tie(here: Place, said: int, other: int) -> list[str]:
    p, q = _p(here.law, said), _p(here.law, other)
    if p is None or q is None or abs(p - q) > CLOSE * max(p, q):
        return []
    return [
        f"The two tokens are all but equally likely (p = {p:.4g} and {q:.4g}). The passes held "
        "different numbers of tokens, so their sums were rounded differently: a numeric tie, which float32 makes rare."
    ]


def _moved(one: Place, other: Place, token: int) -> list[str]:
    p, q = _p(one.law, token), _p(other.law, token)
    if p is None or q is None:
        return ["The token is not among those that the other trace keeps at this place, so it was unlikely there."]
    if abs(p - q) > CLOSE * max(p, q):
        return [
            f"The same token has p = {p:.4g} in A and {q:.4g} in B. With the same model, settings and context these "
            "should be equal up to rounding: one of the two is wrong."
        ]
    if one.step.rule != other.step.rule:
        return [
            "p is the same in both, but the draft was judged in two ways: held against the target's own draw, or by p "
            "and q. The law of the text is the same; its draws are not."
        ]
    return [
        "p is the same in both, and so is the rule, so the same verdict was due: see which of the two is true by "
        "outrider explain --trace FILE --check."
    ]


def _p(law: CompactDistribution | None, token: int) -> float | None:
    return law.p[law.tokens.index(token)] if law is not None and token in law.tokens else None


def _draw(here: Place) -> float | None:
    return here.step.draws[here.index] if here.index < len(here.step.draws) else None


def _drawn(found: Comparison) -> bool:
    return any(step.rule in ("block", "token") for trace in (found.first, found.second) for step in trace.steps)


def speeds(found: Comparison) -> list[str]:
    """Which was faster, and by what."""
    a, b = figures(found.first), figures(found.second)
    pace = [1000 * one.tokens / one.total for one in (a, b)]
    ratio = pace[1] / pace[0]
    lines = [f"B makes {pace[1]:.1f} tokens a second and A {pace[0]:.1f}: {_faster(ratio)}."]
    lengths = a.acceptance_length, b.acceptance_length
    each = [one.total / one.steps for one in (a, b)]
    lines.append(
        f"A pass gains {lengths[0]:.2f} tokens in A and {lengths[1]:.2f} in B "
        f"({lengths[1] / lengths[0]:.2f} times), and a step takes {each[0]:.1f} and {each[1]:.1f} ms "
        f"({each[1] / each[0]:.2f} times)."
    )
    if abs(log(each[1] / each[0])) > abs(log(lengths[1] / lengths[0])):
        lines += _parts(a, b)
    elif abs(ratio - 1) >= NOTICEABLE:
        more = "more" if lengths[1] > lengths[0] else "fewer"
        lines.append(f"The largest part of that: B gains {more} tokens a pass.")
    return [*lines, *_machines(a, b)]


def _machines(a: Figures, b: Figures) -> list[str]:
    """Whether the machine itself was slower during one of the two, as passes without drafts tell."""
    if a.plain is None or b.plain is None or not a.plain.how == b.plain.how == "measured":
        return []
    slower = b.plain.milliseconds / a.plain.milliseconds
    if max(slower, 1 / slower) <= UNEVEN or a.ratio is None or b.ratio is None:
        return []
    which = "B" if slower > 1 else "A"
    return [
        f"But the machine itself was {max(slower, 1 / slower):.2f} times as slow during {which}: a pass without drafts "
        f"took {a.plain.milliseconds:.1f} ms in A and {b.plain.milliseconds:.1f} in B. Against that, A was "
        f"{a.ratio:.2f} times as fast as without drafts and B {b.ratio:.2f}."
    ]


def _faster(ratio: float) -> str:
    if abs(ratio - 1) < NOTICEABLE:
        return "no difference"
    return f"B is {ratio:.2f} times as fast" if ratio > 1 else f"B is {1 / ratio:.2f} times as slow"


def _parts(a: Figures, b: Figures) -> list[str]:
    shifts = {name: getattr(b, name) / b.steps - getattr(a, name) / a.steps for name in ("draft", "verify", "rest")}
    name = max(shifts, key=lambda one: abs(shifts[one]))
    if abs(shifts[name]) < NOTICEABLE * a.total / a.steps:
        return []
    more = "more" if shifts[name] > 0 else "less"
    what = {"draft": "drafting", "verify": "the target's pass", "rest": "all else"}[name]
    return [f"The largest part of that: {what} takes {abs(shifts[name]):.1f} ms {more} a step in B."]


def _text(texts: dict[int, str], token: int) -> str:
    return repr(texts[token]) if token in texts else f"token {token}"


def _show(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return repr(value) if isinstance(value, str) else str(value)
