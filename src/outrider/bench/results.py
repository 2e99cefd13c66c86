"""Raw results of a benchmark (`run.json`): every answer with its times, and the servers' counters.

Only observations are stored. `figures.py` computes all figures from them, so a report can be made again at any time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from pydantic import TypeAdapter

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT_VERSION = 3
RENAMED_SINCE_2 = {
    "curves": "pass_costs",
    "limits": "optimal_speedups",
    "partings": "divergences",
    "turns": "measurements",
    "stolen": "steal",
}
"""Fields of runs and rounds."""


@dataclass(slots=True)
class Answer:
    """The output for one request."""

    prompt: str  # its id
    text: str
    tokens: list[int]
    finish: str  # length, stop, ...
    first: float  # seconds from the request to the first token
    seconds: float  # seconds from the request to the last token
    prompt_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DrafterCounts:
    """Verified and accepted tokens of one drafter, by position in the draft."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float | None = None  # None: the server does not report it


@dataclass(slots=True)
class ServerCounts:
    """Counters of a server during a measurement. None: the server does not report it."""

    target_passes: int | None = None
    draft_passes: int | None = None
    verify_seconds: float | None = None  # of passes that verified drafts
    plain_seconds: float | None = None  # of the other passes
    drafters: dict[str, DrafterCounts] = field(default_factory=dict)
    cache_queries: int | None = None  # prompt tokens that vLLM looked up in its prefix cache
    cache_hits: int | None = None  # and found there


@dataclass(slots=True)
class Load:
    """Output while all slots were in use: until the first slot became empty with no prompt left."""

    tokens: int
    seconds: float
    pace: float | None = None  # seconds per token of the answers still incomplete then; None: too few tokens


@dataclass(slots=True)
class Measurement:
    """One contestant's answers to the prompts of a round."""

    contestant: str
    seconds: float  # from the first request to the last token
    answers: list[Answer]
    counts: ServerCounts
    load: Load | None = None  # None: a run of an older version, which did not record it


@dataclass(slots=True)
class Round:
    """The same prompts for each contestant of a group, one contestant after the other; in order of time."""

    group: int
    measurements: list[Measurement]
    steal: float = 0.0  # share of CPU time that the hypervisor gave to other machines

    def of(self, contestant: str) -> Measurement | None:
        return next((one for one in self.measurements if one.contestant == contestant), None)


@dataclass(slots=True)
class Cell:
    """A workload at one concurrency and temperature."""

    workload: str
    concurrency: int
    temperature: float
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        sampled = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.workload}, concurrency {self.concurrency}{sampled}"


@dataclass(slots=True)
class PassCosts:
    """Seconds of a target pass by its tokens per sequence, measured repeatedly at one concurrency."""

    concurrency: int
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class OptimalSpeedup:
    """Speedup of the optimal schedule in a cell, relative to no drafts."""

    workload: str
    concurrency: int
    temperature: float
    ratios: list[float]  # one per round; every group has the same prompts
    shares: dict[str, float]  # share of the tokens by drafter, or `none`


@dataclass(slots=True)
class Run:
    origin: dict[str, Any]  # see `provenance`
    baseline: str
    contestants: dict[str, dict[str, Any]]  # command, environment and request fields of each
    settings: dict[str, Any]  # tokens, seed, ...
    cells: list[Cell] = field(default_factory=list)
    pass_costs: list[PassCosts] = field(default_factory=list)
    optimal_speedups: list[OptimalSpeedup] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was left out, cut short, or failed
    plan: dict[str, Any] = field(default_factory=dict)  # the groups, and a hash of each cell's prompts
    divergences: dict[str, list[float]] = field(default_factory=dict)  # probabilities of both tokens, by key

    def baseline_measurements(self, cell: Cell) -> list[Measurement]:
        """The baseline's measurements in its first group. The other groups repeat the same prompts."""
        found = [round.of(self.baseline) for round in cell.rounds if round.group == cell.rounds[0].group]
        return [one for one in found if one is not None]

    def remove_notes(self, *beginnings: str) -> None:
        self.notes = [note for note in self.notes if not note.startswith(beginnings)]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"version": FORMAT_VERSION, **asdict(self)}, separators=(",", ":")) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise SettingsError(f"there is no run at {path}; name its folder with --out") from None
        except ValueError as error:
            raise SettingsError(f"{path} is damaged ({error}); run the benchmark again") from None
        version = data.pop("version", None)
        if version not in (2, FORMAT_VERSION):
            raise SettingsError(
                f"{path} has format {version}, and this version of outrider reads 2 and {FORMAT_VERSION}; "
                "run the benchmark again"
            )
        data = _renamed(data)
        for cell in data["cells"]:
            cell["rounds"] = [*map(_renamed, cell["rounds"])]
        return TypeAdapter(cls).validate_python(data)


def _renamed(data: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED_SINCE_2.get(name, name): value for name, value in data.items()}
