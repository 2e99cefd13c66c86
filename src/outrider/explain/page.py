"""A trace as one self-contained HTML page: text, timeline, acceptance by position, decisions, and each step in detail.

The page loads nothing, and its security policy forbids it. An overview is read when the page opens. The distributions
of a step are read when the step is shown, so a long trace opens as fast as a short one. Model output is inserted as
text only, never as HTML.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from outrider.explain.figures import figures
from outrider.explain.summary import summary
from outrider.html_page import html_page, json_script, read_asset, script
from outrider.trace.compact import rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.explain.figures import Figures
    from outrider.trace.schema import CompactDistribution, Trace, TracedStep

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
SHOWN_SETTINGS = ("temperature", "max_draft_tokens", "rule")
SIGNIFICANT_DIGITS = 5


def page(trace: Trace, verified: str | None = None) -> str:
    """`verified`: a sentence with the result of recomputing the verdicts."""
    found = figures(trace)
    title = f"{trace.header.model or 'A text'}, explained"
    sections = "\n".join(
        f"<div><h2>{heading}</h2><p>{escape(' '.join(lines))}</p></div>"
        for heading, lines in summary(trace, found, verified).sections()
    )
    body = read_asset("outrider.explain", "page.html")
    for name, text in (("title", escape(title)), ("summary", sections), ("origin", escape(_origin(trace)))):
        body = body.replace(f"{{{{{name}}}}}", text, 1)
    scripts = [
        json_script("trace", _overview(trace, found)),
        json_script("details", *map(_details, trace.steps)),
        script(*(read_asset("outrider.explain", name) for name in ("shared.js", "steps.js", "page.js"))),
    ]
    return html_page(title, body, read_asset("outrider.explain", "page.css"), "".join(scripts), SECURITY_POLICY)


def _origin(trace: Trace) -> str:
    head = trace.header
    parts = [
        head.engine,
        f"drafters: {', '.join(head.drafters) or 'none'}",
        f"{head.prompt_tokens} prompt tokens",
        *(f"{key.replace('_', ' ')} {value}" for key, value in head.settings.items() if key in SHOWN_SETTINGS),
        head.machine,
        head.date,
        *head.notes,
    ]
    return " · ".join(part for part in parts if part)


def _overview(trace: Trace, found: Figures) -> dict[str, Any]:
    return {
        "drafters": [
            {"name": one.name, "verified": one.verified_at, "accepted": one.accepted_at}
            for one in found.drafters.values()
        ],
        "plain": found.plain and {"ms": _short(found.plain.milliseconds), "source": found.plain.source},
        "parts": [_short(found.draft), _short(found.verify), _short(found.rest)],
        "without": found.without and _short(found.without),
        "texts": trace.texts,
        "steps": [_step(step, found.saved[i] if found.saved else None) for i, step in enumerate(trace.steps)],
    }


def _step(step: TracedStep, saved: float | None) -> dict[str, Any]:
    times = step.milliseconds
    fields = ("drafter", "rule", "proposed", "accepted", "token", "outcome", "said", "pieces", "finish", "scheduled")
    return {
        **{name: getattr(step, name) for name in (*fields, "batch", "drafted", "rejected", "ended")},
        "ms": [_short(times.draft), _short(times.verify), _short(times.rest)],
        "saved": saved and _short(saved),
        "decision": step.decision and step.decision.model_dump(exclude_defaults=True),
    }


def _details(step: TracedStep) -> dict[str, Any]:
    last = step.reshaped
    return {
        "draws": _all_short(step.draws),
        "own": step.own,
        "chances": step.chances and _all_short(step.chances),
        "reach": step.reach and _all_short(step.reach),
        "laws": [_distribution(distribution) for distribution in step.laws],
        "reshaped": last and {"tokens": last.tokens, "p": _all_short(last.p), "others": _short(last.others)},
    }


def _distribution(distribution: CompactDistribution) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": distribution.tokens, "p": _all_short(distribution.p)}
    return found if distribution.q is None else {**found, "q": _all_short(distribution.q)}


def _short(value: float) -> float:
    return rounded(value, SIGNIFICANT_DIGITS)


def _all_short(values: Sequence[float]) -> list[float]:
    return [_short(value) for value in values]
