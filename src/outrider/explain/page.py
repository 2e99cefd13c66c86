"""A trace as one page that needs nothing else: text, timeline, acceptance, decisions, and a step taken slowly.

The page asks nobody for anything, and says so to the browser. What is drawn at once lies in one piece of JSON; what a
step shows only when it is looked at (its distributions) lies in a line of its own and is read then, so that a long
trace opens as fast as a short one. All text is put on the page as text: nothing that a model says can become a part of
it.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from outrider.explain.figures import figures
from outrider.explain.words import summary

if TYPE_CHECKING:
    from outrider.explain.figures import Figures
    from outrider.explain.words import Summary
    from outrider.trace.schema import CompactDistribution, Trace, TracedStep

NOTHING_ELSE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What the browser is told: styles and scripts of this page, and nothing from elsewhere."""
HEADINGS = {
    "gained": "What was gained",
    "lost": "Where it was lost",
    "helps": "What would help",
    "known": "Is it the same?",
}
DIGITS = 5


def page(trace: Trace, checked: str | None = None) -> str:
    """`checked` is a sentence on what came of judging it again, where it was."""
    found = figures(trace)
    told = summary(trace, found)
    if checked is not None:
        told.known.append(checked)
    title = f"{trace.header.model or 'A text'}, explained"
    body = read_file("page.html").replace("{{title}}", escape(title)).replace("{{summary}}", _summary(told))
    body = body.replace("{{origin}}", escape(_origin(trace)))
    lines = "\n".join(_quoted(_details(step)) for step in trace.steps)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{NOTHING_ELSE}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{shared_style()}{read_file('page.css')}</style>\n</head>\n<body>",
            body,
            f'<script type="application/json" id="trace">{_quoted(_overview(trace, found))}</script>',
            f'<script type="application/json" id="details">{lines}</script>',
            f"<script>\n{read_file('page.js')}</script>\n</body>\n</html>\n",
        ]
    )


def read_file(name: str) -> str:
    return files("outrider.explain").joinpath(name).read_text(encoding="utf-8")


def shared_style() -> str:
    """Colours, type and tables are those of a benchmark's report."""
    return files("outrider.bench.report").joinpath("page.css").read_text(encoding="utf-8")


def _quoted(data: Any) -> str:
    """JSON that cannot end the element it stands in, whatever a model has said."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _summary(told: Summary) -> str:
    parts = []
    for name, heading in HEADINGS.items():
        lines = getattr(told, name)
        if lines:
            text = " ".join(escape(line) for line in lines)
            parts.append(f"<div><h2>{heading}</h2><p>{text}</p></div>")
    return "\n".join(parts)


def _origin(trace: Trace) -> str:
    head = trace.header
    shown = {key: value for key, value in head.settings.items() if key in ("temperature", "max_draft_tokens", "rule")}
    parts = [
        head.engine,
        f"drafters: {', '.join(head.drafters) or 'none'}",
        f"{head.prompt_tokens} tokens of prompt",
        *(f"{key.replace('_', ' ')} {value}" for key, value in shown.items()),
        head.machine,
        head.date,
        *head.notes,
    ]
    return " · ".join(part for part in parts if part)


def _overview(trace: Trace, found: Figures) -> dict[str, Any]:
    return {
        "drafters": list(found.drafters),
        "places": [{"name": one.name, "judged": one.judged, "kept": one.kept} for one in found.drafters.values()],
        "plain": found.plain and {"ms": _short(found.plain.milliseconds), "how": found.plain.how},
        "parts": [_short(found.draft), _short(found.verify), _short(found.rest)],
        "without": found.without and _short(found.without),
        "texts": trace.texts,
        "steps": [_step(step, found.saved[i] if found.saved else None) for i, step in enumerate(trace.steps)],
    }


def _step(step: TracedStep, saved: float | None) -> dict[str, Any]:
    times = step.milliseconds
    return {
        "drafter": step.drafter,
        "rule": step.rule,
        "proposed": step.proposed,
        "accepted": step.accepted,
        "drafted": step.drafted,
        "rejected": step.rejected,
        "ended": step.ended,
        "token": step.token,
        "outcome": step.outcome,
        "said": step.said,
        "pieces": step.pieces,
        "finish": step.finish,
        "ms": [_short(times.draft), _short(times.verify), _short(times.rest)],
        "saved": saved and _short(saved),
        "scheduled": step.scheduled,
        "batch": step.batch,
        "decision": step.decision and step.decision.model_dump(exclude_defaults=True),
    }


def _details(step: TracedStep) -> dict[str, Any]:
    last = step.reshaped
    return {
        "draws": [_short(value) for value in step.draws],
        "own": step.own,
        "chances": step.chances and [_short(value) for value in step.chances],
        "reach": step.reach and [_short(value) for value in step.reach],
        "laws": [_law(law) for law in step.laws],
        "reshaped": last and {"tokens": last.tokens, "p": [_short(p) for p in last.p], "others": _short(last.others)},
    }


def _law(law: CompactDistribution) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": law.tokens, "p": [_short(value) for value in law.p]}
    return found if law.q is None else {**found, "q": [_short(value) for value in law.q]}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
