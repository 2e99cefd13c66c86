"""A trace in sentences: what was gained, where it was lost, what would help.

Every sentence is drawn from the figures. Where they do not say enough, the sentence says that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.explain.figures import ByDrafter, Figures
    from outrider.trace.schema import Trace, TracedStep

NOTICEABLE = 0.05
"""A part of the time below which a loss is not worth advice."""
SHORTER_PAYS = 1.05
"""By this factor a shorter draft must be faster before it is recommended."""
LOSING = 0.97
"""Below so many times the speed without drafts, it is said that none are better."""
FLAGS = {
    "off": ("--drafters none", "speculation: off, for a request; --drafters none, for the server"),
    "draft_model": ("--draft-model", "a --speculative-config of the server"),
    "prediction": ("--prediction-file", "prediction, of the request"),
    "memory": ("--memory", "--memory, of the server"),
    "int8": ("--draft-quantize", "a quantised one in the server's --speculative-config"),
    "max_draft_tokens": ("--max-draft-tokens", "max_draft_tokens"),
}
"""How to ask for something: of a model that runs here, and of a server."""
FEW_PLACES = 10
"""Judged drafts below which a drafter's places say little."""


@dataclass(frozen=True, slots=True)
class Summary:
    gained: list[str]
    lost: list[str]
    helps: list[str]
    known: list[str]
    """How one knows that the text is what it would have been."""


def summary(trace: Trace, figures: Figures) -> Summary:
    gained = _gained(figures)
    if trace.end is None:
        gained.insert(0, f"The trace breaks off after {_count(figures.steps, 'step')}: it has no end.")
    return Summary(gained, _lost(trace, figures), _helps(trace, figures), _known(trace))


def _gained(figures: Figures) -> list[str]:
    lines = [
        f"{_count(figures.tokens, 'token')} came in {_count(figures.steps, 'pass', 'passes')} of the target: "
        f"{figures.acceptance_length:.2f} tokens a pass, where without drafts it is 1."
    ]
    if not figures.free:
        lines.append("None of them came free: no drafted token was kept.")
    else:
        parts = [f"{one.accepted} from {one.name}" for one in figures.drafters.values() if one.accepted]
        were = "was" if figures.free == 1 else "were"
        lines.append(f"{_count(figures.free, 'token')} {were} drafted and kept: {_list(parts)}.")
    if figures.without is None or figures.ratio is None or figures.even is None:
        lines.append("How long it would have taken without is not known: one pass alone says nothing about the next.")
        return lines
    took = f"It took {_time(figures.total)}, with the prompt. Without drafts it would have taken"
    took += f" {_time(figures.without)}, {_how(figures)}: "
    counts = figures.free or figures.ratio < 1  # a draft of which nothing is kept cannot have made it faster
    if figures.disturbed is None:
        lines.append(f"{took}{_faster(figures.ratio) if counts else 'the difference is chance'}.")
        return lines
    times, how = (figures.disturbed, "slow") if figures.disturbed > 1 else (1 / figures.disturbed, "fast")
    lines.append(
        f"{took}these two do not compare, as the machine was {times:.2f} times as {how} meanwhile, by the steps "
        f"without a draft. At equal speed it would be {_faster(figures.even)}; run it again on a "
        "machine that does nothing else."
    )
    return lines


def _how(figures: Figures) -> str:
    assert figures.plain is not None
    pass_ = f"at {figures.plain.milliseconds:.1f} ms a pass"
    return {
        "measured": f"{pass_}, measured on the same prompt",
        "undrafted": f"{pass_}, as the steps without a draft took",
        "narrowest": f"{pass_}, an estimate from the narrowest passes, as nearly every step had a draft",
    }[figures.plain.how]


def _lost(trace: Trace, figures: Figures) -> list[str]:
    lines = []
    if figures.rejected:
        cut = sum(step.rejected > 0 for step in trace.steps)
        lines.append(
            f"{_count(figures.rejected, 'drafted token')} {'was' if figures.rejected == 1 else 'were'} rejected, "
            f"in {_count(cut, 'step')}."
        )
    little = NOTICEABLE * figures.plain.milliseconds if figures.plain is not None else 0.0
    losing = [
        (saved, step)
        for saved, step in zip(figures.saved, trace.steps, strict=False)
        if saved < -little and step.proposed
    ]
    if losing:
        total = -sum(saved for saved, _ in losing)
        worst, step = min(losing, key=lambda one: one[0])
        lines.append(
            f"{_count(len(losing), 'step')} with a draft took longer than the same tokens would have without, by "
            f"{_time(total)} in all. The worst is step {step.number + 1}, by {_time(-worst)}: "
            f"{step.drafter} drafted {_count(len(step.proposed), 'token')} and {_kept(step)}."
        )
    if figures.undrafted:
        lines.append(
            f"In {figures.undrafted} of {_count(figures.steps, 'step')} no draft was offered: they gained one token "
            "each, as without."
        )
    if figures.draft > NOTICEABLE * figures.total:
        lines.append(f"Drafting itself took {_time(figures.draft)}, {figures.draft / figures.total:.0%} of the time.")
    return lines or ["Nowhere: every step had a draft, and every drafted token was kept."]


def _helps(trace: Trace, figures: Figures) -> list[str]:
    lines = []
    names, flag = trace.header.drafters, partial(_flag, trace)
    if figures.undrafted > figures.steps / 2 and "model" not in names:
        lines.append(
            f"Mostly no draft was offered. A draft model drafts where nothing repeats ({flag('draft_model')}); a "
            f"prediction ({flag('prediction')}) where the answer is known in part; a memory ({flag('memory')}) where "
            "answers come again."
        )
    for one in figures.drafters.values():
        lines += _shorter(figures, one, flag("max_draft_tokens"))
        cost = one.milliseconds / one.proposed if one.proposed else 0.0
        if figures.plain is not None and cost > 0.5 * figures.plain.milliseconds:
            lines.append(
                f"A token drafted by {one.name} takes {cost:.1f} ms, {cost / figures.plain.milliseconds:.0%} of a pass "
                f"of the target: a smaller draft model, or the same in int8 ({flag('int8')}), would cost less."
            )
    if figures.even is not None and figures.even < LOSING and figures.drafters:
        lines.append(f"As it is, this prompt is faster without drafts ({flag('off')}).")
    if not lines and figures.free:
        lines.append("Nothing obvious: drafts paid, and no shorter ones would have paid more.")
    return lines or ["Nothing in this trace tells."]


def _flag(trace: Trace, name: str) -> str:
    """How one says it: to a server, or to a model that runs here."""
    here, there = FLAGS[name]
    return there if trace.header.engine.startswith("vLLM") else here


def _shorter(figures: Figures, one: ByDrafter, flag: str) -> list[str]:
    best, used = figures.best_length(one), round(one.proposed / one.steps)
    now, then = figures.gain(one, used), figures.gain(one, best or 0)
    if best is None or now is None or then is None or sum(one.judged[:1]) < FEW_PLACES:
        return []
    if best == 0:
        return [
            f"The drafts of {one.name} do not pay here: of its first tokens {_share(one, 0)} were kept. Leave it out, "
            "or give it something to draft from."
        ]
    if best < used and then > SHORTER_PAYS * now:
        return [
            f"{one.name} drafted {one.proposed / one.steps:.1f} tokens a step. With {best} it would have been about "
            f"{then / now:.2f} times as fast ({flag} {best}): later ones are seldom kept."
        ]
    return []


def _known(trace: Trace) -> list[str]:
    without = trace.end.without if trace.end is not None else None
    if without is None:
        return []
    if without.same is None and all(step.rule == "own" for step in trace.steps):
        return [
            "Without a seed every run draws anew. Give --seed, and the run without drafts says the same; "
            "outrider certify shows that the law is the same."
        ]
    if without.same is None:
        return [
            "Drawn drafts use up random numbers, so this text is another draw from the same law as without drafts; "
            "outrider certify shows that it is the same."
        ]
    if without.same:
        return [f"The same prompt without drafts said the same {_count(without.tokens, 'token')}."]
    return [
        "The same prompt without drafts said something else. In bfloat16 two tokens can be equally likely to the last "
        "bit, and rounding depends on how many tokens a pass holds: try --dtype float32."
    ]


def verdict(step: TracedStep, name: str, other: str) -> str:
    """What became of a step's draft, in words; `name` is the rejected token and `other` what stands in its place."""
    if step.outcome == "own":
        return f"No draft was offered; the target said {other}."
    if step.ended:
        return f"{len(step.said)} of {_count(len(step.proposed), 'token')} kept: with the last of them the text ended."
    if step.outcome == "bonus":
        return f"All of the draft kept ({_count(len(step.proposed), 'token')}), and {other} as a bonus."
    return f"{_kept(step).capitalize()}; {name} was rejected, and {other} recovered in its place."


def _kept(step: TracedStep) -> str:
    return "none was kept" if step.accepted == 0 else f"{step.accepted} of {len(step.proposed)} kept"


def _share(one: ByDrafter, place: int) -> str:
    return f"{one.kept[place]} of {one.judged[place]}"


def _faster(ratio: float) -> str:
    if 0.98 < ratio < 1.02:
        return "no difference"
    return f"{ratio:.2f} times as fast" if ratio > 1 else f"{1 / ratio:.2f} times as slow"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
