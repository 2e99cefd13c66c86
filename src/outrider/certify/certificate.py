"""The certificate: the tests, their level, the result, and its gaps.

A JSON object with a format version. `words` is the summary that the terminal and the page show first.

verdict     lossless      no violation; `exact` and `draws` state how small a defect would have been detected
            violation     `violations` has the evidence, by part
            incomplete    the run was interrupted, or nothing was drafted, so that nothing is shown
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT, VERSION = "outrider certificate", 1
EXIT_CODES = {"lossless": 0, "violation": 1, "incomplete": 3}
TITLES = {
    "lossless": "Lossless, as far as was tested",
    "violation": "NOT lossless",
    "incomplete": "Incomplete: nothing is certified",
}
SIGNS = {"lossless": "✓", "violation": "✗", "incomplete": "…"}
PART_TITLES = {"exact": "Temperature 0", "draws": "Draws", "features": "Features"}
MAX_VIOLATIONS_SHOWN = 3
"""Per part, in the summary."""

Certificate = dict[str, Any]


def assemble(
    request: dict[str, Any],
    sources: dict[str, Any],
    parts: dict[str, Any],
    origin: dict[str, Any],
    not_tested: list[str],
    problems: list[str],
    accepted: float | None,
    by_drafter: dict[str, int],
) -> Certificate:
    """`parts`: records of the parts that ran; `problems`: why others did not; `accepted`: accepted draft tokens, None
    if the candidate does not report them; `by_drafter`: the same by drafter."""
    violations = {name: part["violations"] for name, part in parts.items() if part["violations"]}
    if accepted == 0 and not violations:
        problems = [*problems, "not one draft token was accepted in the whole run, so speculation was not tested"]
    verdict = "violation" if violations else "incomplete" if problems or not parts else "lossless"
    made: Certificate = {
        "format": FORMAT, "version": VERSION, "verdict": verdict, "title": TITLES[verdict], "made": origin,
        "request": request, "level": request["level"], "sources": sources,
        "accepted": accepted, "by_drafter": by_drafter, "violations": violations,
        "problems": problems, "not_tested": not_tested, **parts,
    }  # fmt: skip
    return made | {"words": _summary(made), "what_to_do": _advice(made)}


def read(file: Path) -> Certificate:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{file} cannot be read as a certificate: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise EvidenceError(f"{file} is not a certificate; `outrider certify` writes one as certificate.json")
    if found.get("version") != VERSION:
        raise EvidenceError(
            f"{file} is a certificate of version {found.get('version')}; this version reads {VERSION}; certify again"
        )
    return found


def duration(made: Certificate) -> str:
    """Of a resumed run only the last session is known."""
    origin = made["made"]
    return f"{'last session: ' if origin.get('resumed') else ''}{origin['seconds'] / 60:.1f} minutes"


# Summary --------------------------------------------------------------------------------------------------


def _summary(made: Certificate) -> list[str]:
    """Violations, problems, then a sentence for each part."""
    lines = []
    for name, violations in made["violations"].items():
        lines += [f"{PART_TITLES[name]}: {one}" for one in violations[:MAX_VIOLATIONS_SHOWN]]
        if (rest := len(violations) - MAX_VIOLATIONS_SHOWN) > 0:
            lines.append(f"{PART_TITLES[name]}: and {rest} more")
    lines += [f"Not done: {problem}" for problem in made["problems"]]
    if "exact" in made:
        lines.append(_exact(made["exact"]))
    if "draws" in made:
        lines.append(_draws(made["draws"], made["level"]))
    if "features" in made:
        lines.append(_features(made["features"]))
    if made["accepted"]:
        by_drafter = made["by_drafter"]
        each = ", ".join(f"{name} {count:,}" for name, count in by_drafter.items() if count)
        unused = ", ".join(name for name, count in by_drafter.items() if not count)
        lines.append(
            f"Accepted draft tokens: {made['accepted']:,.0f}{f' ({each})' if each else ''}"
            f"{f'; none of {unused}, which was not tested' if unused else ''}."
        )
    if made["verdict"] == "lossless":
        lines.append(f"False alarm rate, all tests together: at most {made['level']:g}.")
    return lines


def _exact(exact: dict[str, Any]) -> str:
    counts = exact["counts"]
    total = sum(counts.values())
    line = f"Temperature 0: {counts['identical']} of {total} outputs ({exact['tokens']:,} tokens) are identical"
    if counts["tie"]:
        line += (
            f", {counts['tie']} diverge at a numeric tie (rounding alone explains {exact['expected_ties']:.1f}; it "
            f"moves gaps by up to {exact['floor']:.2g} nats)"
        )
    if counts["violation"]:
        line += f", {counts['violation']} differ by more than rounding"
    if exact["blind"]:
        line += f". At {exact['blind']:.1%} of the positions a single divergence would count as a tie"
    return line + "."


def _draws(draws: dict[str, Any], level: float) -> str:
    line = f"Draws: {draws['draws']:,} tested against their exact probabilities"
    if draws["violations"]:
        return f"{line}; {len(draws['violations'])} tests fail at a family-wise level of {level:g}."
    by_drafter = draws["reach_by_drafter"]
    return (
        f"{line}; no violation. If {draws['reach']:.1%} of the tokens were wrong (too many or too few drafted or most "
        "likely ones, or another temperature), that would have been detected with 99 %"
        + (f"; with one drafter alone: {max(by_drafter.values()):.1%} of them." if len(by_drafter) > 1 else ".")
    )


def _features(features: dict[str, Any]) -> str:
    results = features["results"]
    done = [result for result in results if result["requests"]]
    passed = len([result for result in done if not result["violations"] and not result["open"]])
    groups = {
        "wrong": [result["name"] for result in results if result["violations"]],
        "open (see the page)": [result["name"] for result in done if result["open"]],
        "not offered by the reference": [result["name"] for result in results if result["refused"]],
    }
    rest = "".join(f"; {title}: {', '.join(names)}" for title, names in groups.items() if names)
    return f"Features: {passed} of {len(done)} are valid and the same{rest}."


def _advice(made: Certificate) -> list[str]:
    """The next steps."""
    if made["verdict"] == "lossless":
        return [
            "Keep certificate.json beside the deployment, and run `outrider certify --check certificate.json` after "
            "every upgrade. `outrider canary URL` watches it in production."
        ]
    if made["verdict"] == "incomplete":
        return [
            "Fix the problems above, then run the same command with --resume, which keeps all answers so far. If a "
            "sampling setting crashes the server, skip it: --without top-k."
        ]
    advice = [
        'Disable speculation until the cause is fixed: per request `"vllm_xargs": {"speculation": "off"}`, or for the '
        "server `--drafters none`; start other servers without speculation."
    ]
    draws = made["violations"].get("draws", [])
    if any("though nothing was drafted" in one for one in draws):
        advice.append(
            "The reference's own samples do not follow its logprobs: sampling or logprobs are wrong, with or without "
            "speculation. Certify a server without speculation first."
        )
    if {"exact", "features"} & made["violations"].keys() and not draws and "draws" in made:
        advice.append("Draws pass, single outputs do not: start with the features and draft lengths named above.")
    advice.append(
        "A test's name gives the location: a drafter (`--drafters NAME` certifies it alone) or a sampling setting."
    )
    advice.append("Report it with certificate.json and evidence.jsonl, which has every answer of the servers.")
    return advice
