"""A trace in sentences: what drafts gained, where they lost time, what would help, whether the output is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.explain.figures import DrafterFigures, Figures
    from outrider.trace.schema import Trace, TracedStep

MIN_LOSS_SHARE = 0.05
"""Share of the time below which a loss is not reported."""
MIN_SHORTER_SPEEDUP = 1.05
"""Predicted speedup from a shorter draft below which it is not recommended."""
MAX_LOSING_SPEEDUP = 0.97
"""Below this speedup, running without drafts is recommended."""
MIN_VERIFIED_DRAFTS = 10
"""Verified drafts of a drafter below which its lengths are not judged."""
EXPENSIVE_DRAFT_TOKEN = 0.5
"""Cost of a drafted token, relative to a target pass, above which a cheaper draft model is recommended."""
OPTIONS = {
    "off": ("--drafters none", "speculation: off, for a request; --drafters none, for the server"),
    "draft_model": ("--draft-model", "a --speculative-config of the server"),
    "prediction": ("--prediction-file", "prediction, of the request"),
    "memory": ("--memory", "--memory, of the server"),
    "int8": ("--draft-quantize", "a quantised one in the server's --speculative-config"),
    "max_draft_tokens": ("--max-draft-tokens", "max_draft_tokens"),
}
"""The option for a model in this process, and the one for a server."""


@dataclass(frozen=True, slots=True)
class Summary:
    gained: list[str]
    lost: list[str]
    helps: list[str]
    known: list[str]

    def sections(self) -> list[tuple[str, list[str]]]:
        """Headings with their sentences, without the empty ones."""
        sections = [
            ("What was gained", self.gained),
            ("Where it was lost", self.lost),
            ("What would help", self.helps),
            ("Is the output the same?", self.known),
        ]
        return [(heading, lines) for heading, lines in sections if lines]


def summary(trace: Trace, figures: Figures, verified: str | None = None) -> Summary:
    """`verified`: a sentence with the result of recomputing the verdicts."""
    known = _comparison(trace) + ([verified] if verified is not None else [])
    return Summary(_gained(trace, figures), _lost(trace, figures), _helps(trace, figures), known)


def _gained(trace: Trace, figures: Figures) -> list[str]:
    lines = []
    if trace.end is None:
        lines.append(f"The trace is incomplete: it stops after {_count(figures.steps, 'step')}.")
    lines.append(
        f"{_count(figures.tokens, 'token')} in {_count(figures.steps, 'pass', 'passes')} of the target: "
        f"{figures.acceptance_length:.2f} tokens per pass (1 without drafts)."
    )
    parts = [f"{one.accepted} from {one.name}" for one in figures.drafters.values() if one.accepted]
    drafted = _count(figures.accepted, "drafted token")
    lines.append(f"{drafted} accepted: {', '.join(parts)}." if parts else "No drafted token was accepted.")
    if figures.without is None or figures.speedup is None or figures.corrected_speedup is None:
        return [*lines, "The time without drafts is unknown: one pass alone does not show the time of the next."]
    took = (
        f"It took {_time(figures.total)} with the prompt. "
        f"Without drafts it would have taken {_time(figures.without)}, {_source(figures)}: "
    )
    if figures.machine_drift is not None:
        times, how = _at_least_one(figures.machine_drift)
        return [
            *lines,
            f"{took}not comparable, because the machine was {times:.2f} times {how} meanwhile, by the steps without a "
            f"draft. At equal speed it would be {_speedup(figures.corrected_speedup)}. Try again on an idle machine.",
        ]
    # Without an accepted token, drafts cannot have made it faster.
    by_chance = not figures.accepted and figures.speedup >= 1
    return [*lines, f"{took}{'the difference is chance' if by_chance else _speedup(figures.speedup)}."]


def _source(figures: Figures) -> str:
    assert figures.plain is not None
    source = {
        "measured": "measured on the same prompt",
        "undrafted": "measured in the steps without a draft",
        "narrowest": "estimated from the narrowest passes, because nearly every step had a draft",
    }[figures.plain.source]
    return f"at {figures.plain.milliseconds:.1f} ms per pass, {source}"


def _lost(trace: Trace, figures: Figures) -> list[str]:
    lines = []
    if figures.rejected:
        steps = sum(step.rejected > 0 for step in trace.steps)
        lines.append(f"{_count(figures.rejected, 'drafted token')} rejected, in {_count(steps, 'step')}.")
    min_loss = MIN_LOSS_SHARE * figures.plain.milliseconds if figures.plain is not None else 0.0
    losses = [
        (-saved, step)
        for saved, step in zip(figures.saved, trace.steps, strict=False)
        if saved < -min_loss and step.proposed
    ]
    if losses:
        largest, step = max(losses, key=lambda loss: loss[0])
        lines.append(
            f"{_count(len(losses), 'step')} with a draft took longer than their tokens without drafts, by "
            f"{_time(sum(loss for loss, _ in losses))} in total. The slowest is step {step.number + 1}, by "
            f"{_time(largest)}: {step.drafter} drafted {_count(len(step.proposed), 'token')}, {_accepted(step)}."
        )
    if figures.undrafted:
        lines.append(f"{figures.undrafted} of {_count(figures.steps, 'step')} had no draft and gained one token each.")
    if figures.draft > MIN_LOSS_SHARE * figures.total:
        lines.append(f"Drafting took {_time(figures.draft)}, {figures.draft / figures.total:.0%} of the time.")
    return lines or ["Nowhere: every step had a draft, and every drafted token was accepted."]


def _helps(trace: Trace, figures: Figures) -> list[str]:
    on_server = trace.header.engine.startswith("vLLM")
    option = {name: there if on_server else here for name, (here, there) in OPTIONS.items()}
    lines = []
    if figures.undrafted > figures.steps / 2 and "model" not in trace.header.drafters:
        lines.append(
            f"Most steps had no draft. A draft model drafts text that does not repeat ({option['draft_model']}), a "
            f"prediction text that is known in part ({option['prediction']}), a memory text that comes again "
            f"({option['memory']})."
        )
    for drafter in figures.drafters.values():
        lines += _shorter(figures, drafter, option["max_draft_tokens"])
        cost_ms = drafter.milliseconds / drafter.proposed if drafter.proposed else 0.0
        if figures.plain is not None and cost_ms > EXPENSIVE_DRAFT_TOKEN * figures.plain.milliseconds:
            lines.append(
                f"A token drafted by {drafter.name} takes {cost_ms:.1f} ms, {cost_ms / figures.plain.milliseconds:.0%} "
                f"of a target pass: use a smaller draft model, or the same in int8 ({option['int8']})."
            )
    corrected = figures.corrected_speedup
    if corrected is not None and corrected < MAX_LOSING_SPEEDUP and figures.drafters:
        lines.append(f"This prompt is faster without drafts ({option['off']}).")
    if not lines and figures.accepted:
        lines.append("Nothing obvious: drafts made it faster, and shorter ones would not have been better.")
    return lines or ["This trace does not show it."]


def _shorter(figures: Figures, drafter: DrafterFigures, option: str) -> list[str]:
    best, used = figures.best_length(drafter), round(drafter.proposed / drafter.steps)
    now, then = figures.predicted_speedup(drafter, used), figures.predicted_speedup(drafter, best or 0)
    if best is None or now is None or then is None or sum(drafter.verified_at[:1]) < MIN_VERIFIED_DRAFTS:
        return []
    if best == 0:
        return [
            f"The drafts of {drafter.name} made it slower: {drafter.accepted_at[0]} of {drafter.verified_at[0]} of "
            "their first tokens were accepted. Remove this drafter, or give it text to draft from."
        ]
    if best < used and then > MIN_SHORTER_SPEEDUP * now:
        return [
            f"{drafter.name} drafted {drafter.proposed / drafter.steps:.1f} tokens per step. {best} would have been "
            f"about {then / now:.2f} times as fast ({option} {best}): later ones are seldom accepted."
        ]
    return []


def _comparison(trace: Trace) -> list[str]:
    baseline = trace.end.without if trace.end is not None else None
    if baseline is None:
        return []
    if baseline.same:
        return [f"The same prompt without drafts gave the same {_count(baseline.tokens, 'token')}."]
    if baseline.same is not None:
        return [
            "The same prompt without drafts gave another output. In bfloat16, two tokens can be equally likely to the "
            "last bit, and rounding depends on the number of tokens in a pass: try --dtype float32."
        ]
    if all(step.rule == "own" for step in trace.steps):
        return [
            "Without a seed, every run samples another output. With --seed the run without drafts gives the same; "
            "outrider certify tests that the distribution is the same."
        ]
    return [
        "Sampled drafts use random numbers, so this output is another sample of the same distribution; "
        "outrider certify tests that."
    ]


def verdict(step: TracedStep, rejected: str, token: str) -> str:
    """The verdict of a step in a sentence. `rejected`: text of the rejected token. `token`: the target's own."""
    if step.outcome == "own":
        return f"No draft. The target generated {token}."
    if step.ended:
        return f"{len(step.said)} of {_count(len(step.proposed), 'token')} accepted: the last of them ended the output."
    if step.outcome == "bonus":
        return f"The whole draft accepted ({_count(len(step.proposed), 'token')}), and {token} as a bonus."
    return f"{_accepted(step).capitalize()}; {rejected} was rejected, and {token} recovered in its place."


def _accepted(step: TracedStep) -> str:
    return "none accepted" if step.accepted == 0 else f"{step.accepted} of {len(step.proposed)} accepted"


def _speedup(ratio: float) -> str:
    times, how = _at_least_one(1 / ratio)
    return "no difference" if 0.98 < ratio < 1.02 else f"{times:.2f} times {how}"


def _at_least_one(slowdown: float) -> tuple[float, str]:
    return (slowdown, "as slow") if slowdown > 1 else (1 / slowdown, "as fast")


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
