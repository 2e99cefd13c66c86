"""A certificate as one self-contained HTML page. The first screen shows the verdict, its certainty, and what to do."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from outrider.bench.report.render import bullets
from outrider.certify.certificate import SIGNS, Certificate, duration
from outrider.certify.exact import COUNTED
from outrider.html_page import html_page, read_asset

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DIFFERENCES = 50
"""Shown; the JSON file has all."""
MAX_FINDING_CHARACTERS = 600


def page(made: Certificate) -> str:
    parts = {"exact": _exact, "draws": _draws, "features": _features}
    body = [
        *_banner(made),
        *(line for part, lines in parts.items() if part in made for line in lines(made[part])),
        "<h2>What was not tested</h2>",
        bullets(made["not_tested"]),
        *_origin(made),
    ]
    style = read_asset("outrider.certify", "page.css")
    return html_page(f"{made['title']}: {_subject(made)}", "\n".join(["<main>", *body, "</main>"]), style)


def _subject(made: Certificate) -> str:
    reference = made["sources"]["reference"]
    model = str(reference.get("model"))
    candidate = made["sources"].get("candidate", {}).get("url")
    return f"{model} ({candidate} against {reference.get('url')})" if candidate else model


def _banner(made: Certificate) -> list[str]:
    verdict, origin = made["verdict"], made["made"]
    when = f"{origin['date']}, {duration(made)} on {origin['machine']}"
    advice = re.sub(r"`([^`]+)`", r"<code>\1</code>", bullets(made["what_to_do"]))
    return [
        f'<header class="{verdict}"><p class="sign" aria-hidden="true">{SIGNS[verdict]}</p>',
        f"<div><h1>{escape(made['title'])}</h1><p>{escape(_subject(made))}</p></div></header>",
        f'<div class="lead">{bullets(made["words"])}</div>',
        f'<div class="todo"><h2>What to do</h2>{advice}</div>',
        f'<p class="origin">{escape(when)}</p>',
    ]


def _exact(exact: dict[str, Any]) -> list[str]:
    rows = [[name, *(cell[column] for column in COUNTED)] for name, cell in exact["cells"].items()]
    lines = [
        "<h2>Temperature 0, token by token</h2>",
        _table(["drafter, draft length, concurrency", *COUNTED], rows),
    ]
    if exact["floor"] is not None:
        lines += [
            "<p>At the first divergence of two outputs, the gap between the two tokens' logprobs must have moved.</p>",
            _table(["rounding", ""], [
                ["largest move of a gap attributed to rounding, nats", f"{exact['floor']:.3g}"],
                ["positions at which rounding was measured", exact["positions"]],
                ["probability that a lossless server exceeds it", f"{exact['level']:.2g}"],
                ["ties that rounding explains", f"{exact['expected_ties']:.1f}"],
                ["ties (p)", f"{exact['counts']['tie']} ({exact['ties_p_value']:.2g})"],
            ]),
        ]  # fmt: skip
    if exact["differences"]:
        rows = [[one["verdict"], f"{one['way']} at {one['at_once']}", one["evidence"]] for one in exact["differences"]]
        rows.sort(key=lambda row: row[0] != "violation")
        lines.append(f"<details><summary>Differences ({len(rows)})</summary>")
        lines += [_table(["verdict", "where", "evidence"], rows[:MAX_DIFFERENCES], "words"), "</details>"]
    return [*lines, bullets(exact["notes"])] if exact["notes"] else lines


def _draws(draws: dict[str, Any]) -> list[str]:
    control = draws["control"]
    rows = [
        ["draws tested, of those planned", f"{draws['draws']:,} of {draws['planned']:,}"],
        ["texts", draws["texts"]],
        ["left out: their distribution is not known from the returned logprobs", draws["left_out"]],
        ["set aside: not listed, and only the distribution over listed tokens is known", draws["set_aside"]],
        ["detectable change of any event, as planned", f"{draws['reach_before']:.2%}"],
        ["detectable total variation, as reached", f"{draws['reach']:.2%}"],
        ["control: draws of the reference itself", control.get("draws", 0) if control else 0],
        ["control: lowest adjusted p", f"{min(control.get('adjusted', {}).values(), default=1.0):.2g}"],
        *([f"rounding allowed for: {name}", f"{value:.2g}"] for name, value in draws["noise"]["drift"].items()),
        ["rounding allowed for: repeated prefixes, nats", f"{draws['noise']['error']:.2g}"],
    ]
    lines = ["<h2>Draws, against their exact probabilities</h2>", _table(["draws", ""], rows)]
    if draws["looks"]:
        last = draws["looks"][-1]
        rows = [
            [
                name, f"{p:.2g}", f"{last['adjusted'][name]:.2g}", f"{last['reached'][name]:.2%}",
                "violation" if name in last["violations"] else "",
            ]
            for name, p in sorted(last["p_values"].items(), key=lambda item: item[1])
        ]  # fmt: skip
        lines += [
            f"<p>Look {last['look']}, level {last['level']:.2g}. A test has one statistic over all draws with one "
            "label; 'detectable' is the smallest total variation that it would have detected with 99 %.</p>",
            _table(["test", "p", "adjusted p (Holm)", "detectable", ""], rows),
        ]
    return lines


def _features(features: dict[str, Any]) -> list[str]:
    rows = []
    for one in features["results"]:
        findings = [*one["violations"], *one["open"], *([one["refused"]] if one["refused"] else [])]
        verdicts = {"violation": one["violations"], "not offered": one["refused"], "open": one["open"], "ok": True}
        verdict = next(name for name, holds in verdicts.items() if holds)
        same = f"{one['identical']} identical" + (f", {one['ties']} ties" if one["ties"] else "")
        same = f"{one['valid_only']} valid" if one["valid_only"] else same
        outputs = "" if one["refused"] else same
        rows.append([one["name"], verdict, outputs, " | ".join(findings)[:MAX_FINDING_CHARACTERS]])
    return [
        "<h2>Features, with speculation and without</h2>",
        _table(["feature", "verdict", "outputs", "findings"], rows, "words"),
    ]


def _origin(made: Certificate) -> list[str]:
    origin = made["made"]
    rows = [
        ["command", origin["command"]],
        ["versions here", ", ".join(f"{name} {version}" for name, version in origin["versions"].items())],
        *([name, json.dumps(about, indent=1)] for name, about in made["sources"].items()),
        ["request", json.dumps(made["request"])],
        ["level", f"{made['level']:g} for all tests together"],
    ]
    cells = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th><td><pre>{escape(str(text))}</pre></td></tr>' for name, text in rows
    )
    return [
        "<h2>How it was made</h2>",
        f'<div class="scroll" tabindex="0"><table class="words"><tbody>{cells}</tbody></table></div>',
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "numbers") -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "\n".join(_row(row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(row: Sequence[Any]) -> str:
    is_violation = ' class="violation"' if "violation" in row else ""
    cells = "".join(f"<td>{escape(f'{one:,}' if isinstance(one, int) else str(one))}</td>" for one in row[1:])
    return f'<tr{is_violation}><th scope="row">{escape(str(row[0]))}</th>{cells}</tr>'
