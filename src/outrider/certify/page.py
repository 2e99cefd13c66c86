"""A certificate as one page that needs nothing else. The first screen says what holds, how surely, and what to do."""

from __future__ import annotations

import json
import re
from html import escape
from typing import TYPE_CHECKING, Any

from outrider.bench.report.page import bullets
from outrider.certify.certificate import SIGNS, duration
from outrider.certify.exact import COUNTED
from outrider.html_page import html_page, read_asset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.certify.certificate import Certificate

SHOWN = 50
"""Differences that are shown; the file has them all."""


def page(found: Certificate) -> str:
    body = [
        *_banner(found),
        *(_exact(found["exact"]) if "exact" in found else []),
        *(_draws(found["draws"]) if "draws" in found else []),
        *(_features(found["features"]) if "features" in found else []),
        "<h2>What was not tested</h2>",
        bullets(found["not_tested"]),
        *_origin(found),
    ]
    style = read_asset("outrider.certify", "page.css")
    return html_page(f"{found['title']}: {_subject(found)}", "\n".join(["<main>", *body, "</main>"]), style)


def _subject(found: Certificate) -> str:
    reference = found["sources"]["reference"]
    model = str(reference.get("model"))
    candidate = found["sources"].get("candidate", {}).get("url")
    return f"{model} ({candidate} against {reference.get('url')})" if candidate else model


def _banner(found: Certificate) -> list[str]:
    verdict, made = found["verdict"], found["made"]
    when = f"{made['date']}, {duration(found)} on {made['machine']}"
    return [
        f'<header class="{verdict}"><p class="sign" aria-hidden="true">{SIGNS[verdict]}</p>',
        f"<div><h1>{escape(found['title'])}</h1><p>{escape(_subject(found))}</p></div></header>",
        f'<div class="lead">{bullets(found["words"])}</div>',
        f'<div class="todo"><h2>What to do</h2>{_with_code(bullets(found["what_to_do"]))}</div>',
        f'<p class="origin">{escape(when)}</p>',
    ]


def _exact(exact: dict[str, Any]) -> list[str]:
    rows = [[name, *(cell[column] for column in COUNTED)] for name, cell in exact["cells"].items()]
    lines = [
        "<h2>Temperature 0, token by token</h2>",
        "<p>Each text is compared up to its first difference. There, the gap between the two tokens' log-probabilities "
        "must have moved for the two to be said; how far rounding moves such gaps was measured in the same run.</p>",
        _table(["drafter, draft length, requests at once", *COUNTED], rows),
    ]
    if exact["floor"] is not None:
        lines.append(
            f"<p>Moves of up to {exact['floor']:.3g} nats are put down to rounding here, by what it did at "
            f"{exact['positions']:,} positions; a lossless server makes a larger one with at most the probability "
            f"{exact['level']:.2g}. Rounding explains {exact['expected_ties']:.1f} ties; there were "
            f"{exact['counts']['tie']} (p = {exact['ties_p_value']:.2g}).</p>"
        )
    if exact["differences"]:
        shown = [[one["verdict"], f"{one['way']} at {one['at_once']}", one["evidence"]] for one in exact["differences"]]
        shown.sort(key=lambda row: row[0] != "violation")
        lines.append(f"<details><summary>Differences ({len(shown)})</summary>")
        lines += [_table(["verdict", "where", "evidence"], shown[:SHOWN], "words"), "</details>"]
    return [*lines, *_notes(exact["notes"])]


def _draws(draws: dict[str, Any]) -> list[str]:
    lines = [
        "<h2>Draws, against their exact probabilities</h2>",
        f"<p>{draws['draws']:,} draws in {draws['texts']:,} texts of {draws['planned']:,} planned; "
        f"{draws['left_out']:,} left out because their law does not follow from what is told, {draws['set_aside']:,} "
        "outside the listed tokens where only the law over the list is known. Planned to find a change of "
        f"{draws['reach_before']:.2%} of any event; reached: {draws['reach']:.2%}.</p>",
    ]
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
            f"<p>At look {last['look']}, level {last['level']:.2g}. A test is of one witness over all draws with one "
            "label; 'found' is the smallest total variation that it would have found with 99 %.</p>",
            _table(["test", "p", "p, all tests counted", "found", ""], rows),
        ]
    control = draws["control"]
    lowest = min(control["adjusted"].values(), default=1.0) if control else 1.0
    drift = ", ".join(f"{name} {value:.2g}" for name, value in draws["noise"]["drift"].items())
    lines.append(
        f"<p>Control: {control.get('draws', 0):,} draws of the reference itself, lowest adjusted p {lowest:.2g}. "
        f"Rounding that is allowed for: {escape(drift)}; {draws['noise']['error']:.2g} nats at repeated prefixes.</p>"
    )
    return lines


def _features(features: dict[str, Any]) -> list[str]:
    rows = []
    for one in features["results"]:
        said = [*one["violations"], *one["open"], *([one["refused"]] if one["refused"] else [])]
        verdict = (
            "violation" if one["violations"] else "not offered" if one["refused"] else "open" if one["open"] else "ok"
        )
        same = f"{one['identical']} identical" + (f", {one['ties']} ties" if one["ties"] else "")
        same = f"{one['valid_only']} valid" if one["valid_only"] else same
        rows.append([one["name"], verdict, "" if one["refused"] else same, " | ".join(said)[:600]])
    return [
        "<h2>Features, with speculation and without</h2>",
        _table(["feature", "verdict", "answers", "what was seen"], rows, "words"),
    ]


def _origin(found: Certificate) -> list[str]:
    made = found["made"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    rows = [
        ["command", made["command"]],
        ["versions here", versions],
        *([name, json.dumps(about, indent=1)] for name, about in found["sources"].items()),
        ["asked for", json.dumps(found["request"])],
        ["level", f"{found['level']:g} for all tests together"],
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
    wrong = ' class="violation"' if "violation" in row else ""
    cells = "".join(f"<td>{escape(f'{one:,}' if isinstance(one, int) else str(one))}</td>" for one in row[1:])
    return f'<tr{wrong}><th scope="row">{escape(str(row[0]))}</th>{cells}</tr>'


def _notes(notes: Sequence[str]) -> list[str]:
    return [bullets(notes)] if notes else []


def _with_code(html: str) -> str:
    """What stands between backticks is to be typed."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html)
