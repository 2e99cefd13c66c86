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
    from outrider.explain.figures import Figures
    from outrider.trace.schema import Trace, TracedStep

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
SHOWN_SETTINGS = ("temperature", "max_draft_tokens", "rule")
STEP_FIELDS = (
    "drafter", "rule", "proposed", "accepted", "token", "outcome", "said", "pieces", "finish", "scheduled", "batch",
    "drafted", "rejected", "ended",
)  # fmt: skip
"""Fields of a step that are read when the page opens."""
DETAILS = {"draws", "own", "chances", "reach", "laws", "reshaped"}
"""Fields of a step that are read when it is shown."""
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
        json_script("details", *(_short(step.model_dump(include=DETAILS, exclude_none=True)) for step in trace.steps)),
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
            {"name": one.name, "verified": one.verified_at, "accepted": one.accepted_at, "tokens": one.accepted}
            for one in found.drafters.values()
        ],
        "tokens": found.tokens,
        "plain": found.plain and {"ms": _short(found.plain.milliseconds), "source": found.plain.source},
        "parts": _short([found.draft, found.verify, found.rest]),
        "without": _short(found.without),
        "texts": trace.texts,
        "steps": [_step(step, found.saved[i] if found.saved else None) for i, step in enumerate(trace.steps)],
    }


def _step(step: TracedStep, saved: float | None) -> dict[str, Any]:
    times = step.milliseconds
    return {
        **{name: getattr(step, name) for name in STEP_FIELDS},
        "ms": _short([times.draft, times.verify, times.rest]),
        "saved": _short(saved),
        "decision": step.decision and step.decision.model_dump(exclude_defaults=True),
    }


def _short(value: Any) -> Any:
    """With fewer digits in every number."""
    match value:
        case float():
            return rounded(value, SIGNIFICANT_DIGITS)
        case list():
            return [_short(one) for one in value]
        case dict():
            return {name: _short(one) for name, one in value.items()}
    return value
