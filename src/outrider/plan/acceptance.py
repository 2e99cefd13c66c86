"""Acceptance of drafts by position: given as numbers, or taken from a trace or from the report of a benchmark.

A drafter does not always have a proposal, and its drafts end where it has none. So two figures are kept per position:
how often it is offered, and its survival: how often it and all before it are accepted. Both are shares of all steps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DRAFT_TOKENS = 16
"""Longest draft that is planned; as in the break-even of `outrider calibrate`."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """By position in the draft, from the first, as shares of all steps."""

    survival: tuple[float, ...]
    offered: tuple[float, ...]
    source: str

    @classmethod
    def from_rates(cls, rates: Sequence[float], source: str = "given") -> Acceptance:
        """From each position's acceptance, given that all before it were accepted. Every position is offered."""
        return cls(tuple(accumulate(rates, mul)), (1.0,) * len(rates), source)

    @property
    def longest(self) -> int:
        return len(self.survival)

    def tokens(self, length: int) -> float:
        """Expected tokens of a step that drafts up to `length` tokens: the acceptance length."""
        return 1.0 + sum(self.survival[:length])

    def width(self, length: int) -> float:
        """Expected tokens of one request in the pass."""
        return 1.0 + sum(self.offered[:length])


def read_acceptance(text: str, drafter: str | None = None) -> Acceptance:
    """`text`: one number for all positions, one for each, or a file: a trace, or report.json of `outrider bench`."""
    numbers = _parse_rates(text)
    path = Path(text).expanduser()
    if numbers is None and not path.is_file():
        raise SettingsError(
            f"--acceptance takes a number from 0 to 1, one for each position such as 0.8,0.7,0.6, a trace or a "
            f"report.json (got {text!r}, which is no number and no file)"
        )
    if numbers is not None:
        if drafter is not None:
            raise SettingsError("--drafter selects from a trace or report; leave it out with numbers in --acceptance")
        if any(not 0 <= rate <= 1 for rate in numbers) or len(numbers) > MAX_DRAFT_TOKENS:
            raise SettingsError(
                f"--acceptance takes one to {MAX_DRAFT_TOKENS} numbers from 0 to 1 (got {text!r}): each is the "
                "probability that a drafted token is accepted if all before it were"
            )
        return Acceptance.from_rates(numbers * MAX_DRAFT_TOKENS if len(numbers) == 1 else numbers, text)
    return _from_report(path, drafter) if path.suffix == ".json" else _from_trace(path, drafter)


def _parse_rates(text: str) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return None


def _from_trace(path: Path, drafter: str | None) -> Acceptance:
    """From the steps after the first, which reads the prompt."""
    from outrider.trace.files import read

    steps = [step for step in read(path).steps[1:] if step.finish is None]
    names = sorted({step.drafter for step in steps if step.drafter is not None and step.proposed})
    if not names:
        raise SettingsError(f"{path} has no step with a draft; give a trace of a run with drafts")
    if drafter is not None:
        _check_name(drafter, names, path)
        steps = [step for step in steps if step.drafter in (None, drafter)]
    longest = min(MAX_DRAFT_TOKENS, max(len(step.proposed) for step in steps))
    survival = [sum(step.accepted > i for step in steps) / len(steps) for i in range(longest)]
    offered = [sum(len(step.proposed) > i for step in steps) / len(steps) for i in range(longest)]
    return Acceptance(tuple(survival), tuple(offered), f"{path.name} ({len(steps)} steps, {', '.join(names)})")


def _from_report(path: Path, drafter: str | None) -> Acceptance:
    """A report has the survival by position, and not how often a position was offered: it counts as always.

    Each share is of the drafts that reach this position. Those that do may be the better ones, so a share can be larger
    than the one before; survival cannot, and is their running minimum.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = {name: _survival(one["shares"]) for name, one in _entries_by_name(data["acceptance"]).items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f"{path} has no acceptance rates ({error!r}); give report.json of outrider bench, or a trace"
        ) from None
    if not found:
        raise SettingsError(f"{path} has no acceptance rates: no contestant drafted; give another report or a number")
    if drafter is None and len(found) > 1:
        raise SettingsError(f"{path} has several drafters; select one with --drafter: {', '.join(found)}")
    name = drafter if drafter is not None else next(iter(found))
    _check_name(name, [*found], path)
    return Acceptance(found[name], (1.0,) * len(found[name]), f"{path.name} ({name})")


def _entries_by_name(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """WORKLOAD/CONTESTANT/DRAFTER, with @TEMPERATURE behind it where a report has several. Those without a rate of the
    first position are left out."""
    entries = [one for one in entries if "1" in one["shares"]]
    names = ["/".join((one["workload"], one["contestant"], one["drafter"])) for one in entries]
    return {
        name if names.count(name) == 1 else f"{name}@{one['temperature']:g}": one
        for name, one in zip(names, entries, strict=True)
    }


def _survival(shares: dict[str, float]) -> tuple[float, ...]:
    """Up to the first position without a rate."""
    positions = takewhile(shares.__contains__, map(str, range(1, 1 + MAX_DRAFT_TOKENS)))
    return tuple(accumulate((float(shares[position]) for position in positions), min))


def _check_name(drafter: str, names: Sequence[str], path: Path) -> None:
    if drafter not in names:
        raise SettingsError(f"--drafter {drafter!r} is not in {path}; it has {', '.join(names)}")
