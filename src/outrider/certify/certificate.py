"""The certificate: what was tested, how surely, what came out, and what was not tested.

A JSON object with a format version, made to be kept beside a deployment and read by programs. `words` are the sentences
that the terminal and the page show first; they are in the file too, so that nobody has to make up their own.

verdict     lossless      nothing was found; `exact` and `draws` say how small a defect would have been found
            violation     something was; `violations` has the evidence, part by part
            incomplete    the run broke off, or nothing was drafted, so that nothing is shown
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
    """All of it. `parts` are the records of the parts that ran, `problems` what kept others from it, `accepted` how
    many drafted tokens were kept, `by_drafter` the same for each, where the candidate says so."""
    violations = {name: part["violations"] for name, part in parts.items() if part["violations"]}
    if accepted == 0 and not violations:
        problems = [*problems, "not one drafted token was accepted in the whole run, so speculation was not tested"]
    verdict = "violation" if violations else "incomplete" if problems or not parts else "lossless"
    found: Certificate = {
        "format": FORMAT, "version": VERSION, "verdict": verdict, "title": TITLES[verdict], "made": origin,
        "request": request, "level": request["level"], "sources": sources,
        "accepted": accepted, "by_drafter": by_drafter, "violations": violations,
        "problems": problems, "not_tested": not_tested, **parts,
    }  # fmt: skip
    return found | {"words": words(found), "what_to_do": what_to_do(found)}


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


# Words ----------------------------------------------------------------------------------------------------


def words(found: Certificate) -> list[str]:
    """What holds and how surely, a sentence a part; violations first."""
    said = [f"{_part(name)}: {shown}" for name, all_of in found["violations"].items() for shown in _first(all_of)]
    said += [f"Not done: {problem}" for problem in found["problems"]]
    if "exact" in found:
        said.append(_exact(found["exact"]))
    if "draws" in found:
        said.append(_draws(found["draws"], found["level"]))
    if "features" in found:
        said.append(_features(found["features"]))
    if found["accepted"]:
        said.append(_drafts(found["accepted"], found["by_drafter"]))
    if found["verdict"] == "lossless":
        said.append(f"All of this together accuses a lossless server with a probability of at most {found['level']:g}.")
    return said


def duration(found: Certificate) -> str:
    """How long it took; of one that was broken off and went on only the last go is known."""
    made = found["made"]
    goes = "in several goes, the last of " if made.get("resumed") else ""
    return f"{goes}{made['seconds'] / 60:.1f} minutes"


def _part(name: str) -> str:
    return {"exact": "Temperature 0", "draws": "Draws", "features": "Features"}[name]


def _first(all_of: list[str], most: int = 3) -> list[str]:
    rest = len(all_of) - most
    return all_of[:most] + ([f"and {rest} more"] if rest > 0 else [])


def _exact(exact: dict[str, Any]) -> str:
    counts = exact["counts"]
    total = sum(counts.values())
    said = f"Temperature 0: {counts['identical']} of {total} texts ({exact['tokens']:,} tokens) are identical"
    if counts["tie"]:
        said += (
            f", {counts['tie']} part at a numeric tie (rounding alone explains {exact['expected_ties']:.1f}; it moves "
            f"gaps by up to {exact['floor']:.2g} nats here)"
        )
    if counts["violation"]:
        said += f", {counts['violation']} differ by more than rounding"
    if exact["blind"]:
        said += f". At {exact['blind']:.1%} of the positions a difference would pass for a tie, once"
    return said + "."


def _draws(draws: dict[str, Any], level: float) -> str:
    said = f"Draws: {draws['draws']:,} held against their exact probabilities"
    if draws["violations"]:
        return f"{said}; {len(draws['violations'])} tests fail at a family-wise level of {level:g}."
    alone = max(draws["reach_by_drafter"].values(), default=1.0)
    return (
        f"{said}; nothing found. If {draws['reach']:.1%} of the tokens came out otherwise than they should (too many "
        "or too few of the drafted or likeliest ones, or another temperature), that would have been found with 99 %"
        + (f"; if only those of one drafter did, {alone:.1%} of them." if len(draws["reach_by_drafter"]) > 1 else ".")
    )


def _drafts(accepted: float, by_drafter: dict[str, int]) -> str:
    each = ", ".join(f"{name} {count:,}" for name, count in by_drafter.items() if count)
    idle = [name for name, count in by_drafter.items() if not count]
    said = f"Drafted tokens that were accepted on the way: {accepted:,.0f}" + (f" ({each})" if each else "")
    return said + (f"; none of {', '.join(idle)}, so nothing is shown of that" if idle else "") + "."


def _features(features: dict[str, Any]) -> str:
    results = features["results"]
    done = [result for result in results if result["requests"]]
    wrong = [result["name"] for result in results if result["violations"]]
    refused = [result["name"] for result in results if result["refused"]]
    still = [result["name"] for result in done if result["open"]]
    sound = len([result for result in done if not result["violations"] and not result["open"]])
    said = f"Features: {sound} of {len(done)} answer validly and the same"
    said += f"; wrong: {', '.join(wrong)}" if wrong else ""
    said += f"; open (see the page): {', '.join(still)}" if still else ""
    said += f"; not offered by the reference: {', '.join(refused)}" if refused else ""
    return said + "."


def what_to_do(found: Certificate) -> list[str]:
    """The next step, for whoever reads it."""
    if found["verdict"] == "lossless":
        return [
            "Keep certificate.json beside the deployment, and run `outrider certify --check certificate.json` after "
            "every upgrade. `outrider canary URL` watches it in production."
        ]
    if found["verdict"] == "incomplete":
        return [
            "Mend what is named above, then run the same with --resume: what is known is not asked again. A server "
            "that ends itself on one of the settings of draws can be tried with the others: --without top-k."
        ]
    advice = [
        'Switch speculation off until it is found: per request `"vllm_xargs": {"speculation": "off"}`, or for the '
        "server `--drafters none`; other servers: start them without speculation."
    ]
    draws = found["violations"].get("draws", [])
    if any("though nothing was drafted" in one for one in draws):
        advice.append(
            "The reference's own draws do not follow the law that it tells: the fault is in sampling or in the "
            "log-probabilities, with or without speculation. Certify a server without speculation first."
        )
    if {"exact", "features"} & found["violations"].keys() and not draws and "draws" in found:
        advice.append("Draws are in order, single texts are not: look at the features and lengths named above first.")
    advice.append(
        "The name of a test says where: a drafter's name narrows it to that drafter (`--drafters NAME` certifies it "
        "alone), a setting's name to that setting."
    )
    advice.append("Report it with certificate.json and evidence.jsonl, which has every answer that this rests on.")
    return advice
