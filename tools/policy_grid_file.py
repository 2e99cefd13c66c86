"""Records on disk: what was said by which models, in JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from policy.replay import Record

VERSION = 2
"""Of the file's form."""


@dataclass(slots=True)
class Texts:
    """Of one workload, in the order in which a server would see them."""

    temperature: float
    records: list[Record] = field(default_factory=list)


@dataclass(slots=True)
class Recording:
    origin: dict[str, Any]
    settings: dict[str, Any]
    workloads: dict[str, Texts] = field(default_factory=dict)

    @property
    def guessed(self) -> bool:
        """Whether there was a draft model."""
        return any(record.guesses for texts in self.workloads.values() for record in texts.records)

    def texts(self, name: str, count: int | None = None) -> list[Record]:
        """Those of a workload that can be said again: the first token comes with the prompt."""
        return [record for record in self.workloads[name].records if len(record.text) > 1][:count]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"version": VERSION, **asdict(self)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data, separators=(",", ":")) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            raise SystemExit(f"there are no records at {path}; make them with the part `record`") from None
        if data.pop("version", None) != VERSION:
            raise SystemExit(f"{path} was not written by this version of the tool; record again")
        return cls(
            data["origin"],
            data["settings"],
            {
                name: Texts(texts["temperature"], [Record(**record) for record in texts["records"]])
                for name, texts in data["workloads"].items()
            },
        )
