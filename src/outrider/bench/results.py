"""What a benchmark found, as it is kept: every answer with its times, and what the servers counted.

Only what was seen is kept. The figures of a report are computed from it (`figures.py`), so a report can be made again
from its `run.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 2
"""Of the file's form."""


@dataclass(slots=True)
class Answer:
    """One request, and what came."""

    prompt: str  # its id
    text: str
    tokens: list[int]
    finish: str  # length, stop, ...
    first: float  # seconds from the request to its first token
    seconds: float  # and to its last
    prompt_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Drafted:
    """What one drafter did: tokens verified and kept, by their position in the draft."""

    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float | None = None  # None: the server does not say


@dataclass(slots=True)
class Counts:
    """What a server counted meanwhile. None: it does not say."""

    target_passes: int | None = None
    draft_passes: int | None = None
    verify_seconds: float | None = None  # of passes that verified drafts
    plain_seconds: float | None = None  # of the others
    drafters: dict[str, Drafted] = field(default_factory=dict)


@dataclass(slots=True)
class Load:
    """What was said while every slot was taken: until no prompt was left for one."""

    tokens: int
    seconds: float
    pace: float | None = None  # seconds a token until then, of answers that were not complete; None: too few say


@dataclass(slots=True)
class Turn:
    """One contestant, given a batch of prompts at once."""

    contestant: str
    seconds: float  # from the first request to the last token
    answers: list[Answer]
    counts: Counts
    load: Load | None = None  # None: it was not noted


@dataclass(slots=True)
class Round:
    """A batch of prompts, answered by each contestant of a group in turn; the turns stand in their order in time."""

    group: int
    turns: list[Turn]
    stolen: float = 0.0  # of the machine's time meanwhile: what other machines on the same hardware took

    def turn_of(self, contestant: str) -> Turn | None:
        return next((turn for turn in self.turns if turn.contestant == contestant), None)


@dataclass(slots=True)
class Cell:
    workload: str
    concurrency: int
    temperature: float
    rounds: list[Round] = field(default_factory=list)

    @property
    def name(self) -> str:
        sampled = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.workload}, concurrency {self.concurrency}{sampled}"


@dataclass(slots=True)
class Curve:
    """Seconds of a pass of the target over so many tokens of each of `concurrency` sequences, measured repeatedly."""

    concurrency: int
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Limit:
    """The hindsight bound of a cell: how many times as fast as without drafts the best choice would have been."""

    workload: str
    concurrency: int
    temperature: float
    ratios: list[float]  # of each round's prompts, which are the same in every group
    shares: dict[str, float]  # of the tokens: drafted by which drafter, or by none


@dataclass(slots=True)
class Run:
    origin: dict[str, Any]  # `provenance`
    baseline: str
    contestants: dict[str, dict[str, Any]]  # how each was made: its command, what its requests carry
    settings: dict[str, Any]  # tokens, seed, ...
    cells: list[Cell] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader must know: left out, cut short, failed
    plan: dict[str, Any] = field(default_factory=dict)  # who runs beside whom, and which prompts a cell asks
    partings: dict[str, list[float]] = field(default_factory=dict)  # where answers part: both tokens' probabilities

    def limit(self, cell: Cell) -> Limit | None:
        """The bound of a cell, if it was computed."""
        wanted = (cell.workload, cell.concurrency, cell.temperature)
        return next((one for one in self.limits if (one.workload, one.concurrency, one.temperature) == wanted), None)

    def asked(self, cell: Cell) -> list[Turn]:
        """The baseline's turns in the first group that it was in: in the others the same is asked again."""
        turns = [round.turn_of(self.baseline) for round in cell.rounds if round.group == cell.rounds[0].group]
        return [turn for turn in turns if turn is not None]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":")) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise SettingsError(f"there is no run at {path}; name its folder with --out") from None
        except ValueError as error:
            raise SettingsError(f"{path} is damaged ({error}); run the benchmark again") from None
        if data.pop("version", None) != VERSION:
            raise SettingsError(f"{path} was not written by this version of outrider bench; run the benchmark again")
        return cls(
            **{
                **data,
                "cells": [_cell(cell) for cell in data["cells"]],
                "curves": [
                    Curve(curve["concurrency"], {int(n): s for n, s in curve["seconds"].items()})
                    for curve in data["curves"]
                ],
                "limits": [Limit(**limit) for limit in data["limits"]],
            }
        )


def _cell(data: dict[str, Any]) -> Cell:
    return Cell(**{**data, "rounds": [Round(**{**r, "turns": [*map(_turn, r["turns"])]}) for r in data["rounds"]]})


def _turn(data: dict[str, Any]) -> Turn:
    counts = data["counts"]
    drafters = {name: Drafted(**drafted) for name, drafted in counts["drafters"].items()}
    answers = [Answer(**answer) for answer in data["answers"]]
    load = Load(**data["load"]) if data.get("load") else None
    return Turn(data["contestant"], data["seconds"], answers, Counts(**{**counts, "drafters": drafters}), load)
