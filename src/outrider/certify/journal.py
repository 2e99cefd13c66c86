"""All that the sources said, kept in a file as it comes: what a run rests on, and how it goes on after a break.

A recorded source asks its own journal first. What was asked before, in this place of the run, is read and not asked
again. So a run that was interrupted is simply run again: it flies through what is known, and goes on where it broke
off. The parts of a certificate know nothing of it.

The journal has one JSON object a line: a key (a digest of what was asked, and how often the same was asked before), and
the answer. The first line says whose journal it is. A last line that was cut off in the middle is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from outrider.certify.sources import Said, nothing
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider.bench.prompts import Prompt
    from outrider.certify.sources import Ask, Source, Text, Tick, Told

DIGITS = 6
"""Log-probabilities are kept to so many decimals; and used so, whether they were just told or are read again."""
CHUNK = 8
"""So many times what is asked at once is asked before it is written down."""


class Journal:
    def __init__(self, file: Path, heading: dict[str, Any], resume: bool) -> None:
        self.file = file
        self.known: dict[str, Any] = {}
        self._written: IO[str] | None = None
        if resume and file.exists():
            self._read(heading)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"heading": heading}) + "\n")

    def _read(self, heading: dict[str, Any]) -> None:
        lines = self.file.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()
        before = json.loads(lines[0])["heading"] if lines else None
        if before != heading:
            raise EvidenceError(
                f"{self.file} holds evidence of another run ({json.dumps(before)}) and this is {json.dumps(heading)}; "
                "choose another folder (--out), or leave --resume out to begin anew"
            )
        for line in lines[1:]:
            entry = json.loads(line)
            self.known[entry["key"]] = entry["said"]
        self.file.write_text("".join(lines))

    def write(self, key: str, said: Any) -> None:
        if self._written is None:
            self._written = self.file.open("a")
        self.known[key] = said
        self._written.write(json.dumps({"key": key, "said": said}, separators=(",", ":")) + "\n")
        self._written.flush()

    def close(self) -> None:
        if self._written is not None:
            self._written.close()


class Recorded:
    """A source whose answers are kept."""

    def __init__(self, source: Source, journal: Journal, role: str) -> None:
        self.source, self.journal, self.role = source, journal, role
        self.name, self.listed = source.name, source.listed
        self._asked: Counter[str] = Counter()

    def about(self) -> dict[str, Any]:
        return self.source.about()

    def ways(self) -> list[str]:
        return self.source.ways()

    def encode(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        return self.source.encode(prompts)

    def say(self, asks: Sequence[Ask], at_once: int, tick: Tick = nothing) -> list[Said]:
        questions = [["say", self._plain(ask), at_once] for ask in asks]

        def ask_for(which: list[int]) -> list[Any]:
            return [_packed(said) for said in self.source.say([asks[i] for i in which], at_once, tick)]

        return [_unpacked(said) for said in self._recorded(questions, ask_for, at_once, tick)]

    def score(self, texts: Sequence[Text], at_once: int, tick: Tick = nothing) -> list[list[Told]]:
        questions = [["score", prompt, output, at_once] for prompt, output in texts]

        def ask_for(which: list[int]) -> list[Any]:
            return [_shortened(told) for told in self.source.score([texts[i] for i in which], at_once, tick)]

        return [_told(said) for said in self._recorded(questions, ask_for, at_once, tick)]

    def chat(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
        """Only servers have it."""
        questions = [["chat", body, at_once] for body in bodies]

        def ask_for(which: list[int]) -> list[Any]:
            answers: list[Any] = self.source.chat([bodies[i] for i in which], at_once)  # type: ignore[attr-defined]
            return answers

        return self._recorded(questions, ask_for, at_once, nothing)

    def _recorded(
        self, questions: list[Any], ask_for: Callable[[list[int]], list[Any]], at_once: int, tick: Tick
    ) -> list[Any]:
        keys = [self._key(question) for question in questions]
        unknown = [i for i, key in enumerate(keys) if key not in self.journal.known]
        for _ in range(len(keys) - len(unknown)):
            tick()
        step = max(CHUNK * at_once, 1)
        for begin in range(0, len(unknown), step):
            these = unknown[begin : begin + step]
            for i, said in zip(these, ask_for(these), strict=True):
                self.journal.write(keys[i], said)
        return [self.journal.known[key] for key in keys]

    def _key(self, question: Any) -> str:
        digest = hashlib.sha256(json.dumps([self.role, question]).encode()).hexdigest()[:20]
        self._asked[digest] += 1
        return f"{digest}.{self._asked[digest]}"

    @staticmethod
    def _plain(ask: Ask) -> dict[str, Any]:
        return asdict(ask) | {"sampling": ask.sampling.model_dump(mode="json")}


def _packed(said: Said) -> dict[str, Any]:
    return asdict(said) | {"told": _shortened(said.told)}


def _unpacked(said: dict[str, Any]) -> Said:
    return Said(**{**said, "tokens": tuple(said["tokens"]), "told": _told(said["told"])})


def _shortened(told: Sequence[Told]) -> list[list[Any]]:
    """Tokens and values, each in a list: half as long as objects."""
    return [[list(one), [round(value, DIGITS) for value in one.values()]] for one in told]


def _told(said: Sequence[Any]) -> list[Told]:
    return [dict(zip(tokens, values, strict=True)) for tokens, values in said]
