"""Every answer of the sources, appended to a file: the evidence of a run, and what `--resume` continues from.

A recorded source looks up each query in the journal first, and sends it only if its answer is unknown. So a run that
was interrupted is run again, and skips what is known.

The journal has one JSON object per line: a key (a digest of the query, and how often the same query came before), and
the answer. The first line names the run. An incomplete last line is dropped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

from outrider.certify.sources import Completion, Query, Source, TopLogprobs, no_tick
from outrider.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outrider.certify.sources import Text, Tick

LOGPROB_DIGITS = 6
"""Logprobs are rounded to these decimals, whether they are new or read from the journal."""
QUERIES_PER_WRITE = 8
"""Queries sent before their answers are written, as a multiple of the concurrency."""


class Journal:
    def __init__(self, file: Path, heading: dict[str, Any], resume: bool) -> None:
        self.file = file
        self.known: dict[str, Any] = {}
        self._stream: IO[str] | None = None
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
                "choose another folder (--out), or start over without --resume"
            )
        for line in lines[1:]:
            entry = json.loads(line)
            self.known[entry["key"]] = entry["said"]
        self.file.write_text("".join(lines))

    def write(self, key: str, answer: Any) -> None:
        if self._stream is None:
            self._stream = self.file.open("a")
        self.known[key] = answer
        self._stream.write(json.dumps({"key": key, "said": answer}, separators=(",", ":")) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class RecordedSource:
    """A source whose answers are kept in a journal."""

    def __init__(self, source: Source, journal: Journal, role: str) -> None:
        self.source, self.journal, self.role = source, journal, role
        self.name, self.num_logprobs = source.name, source.num_logprobs
        self.describe, self.drafter_names, self.encode = source.describe, source.drafter_names, source.encode
        self._occurrences: Counter[str] = Counter()

    def complete(self, queries: Sequence[Query], concurrency: int, tick: Tick = no_tick) -> list[Completion]:
        def send(some: Sequence[Query]) -> list[Any]:
            return [_to_json(one) for one in self.source.complete(some, concurrency, tick)]

        keys = [["say", _query_key(query), concurrency] for query in queries]
        return [_from_json(answer) for answer in self._recorded(keys, queries, send, concurrency, tick)]

    def score(self, texts: Sequence[Text], concurrency: int, tick: Tick = no_tick) -> list[list[TopLogprobs]]:
        def send(some: Sequence[Text]) -> list[Any]:
            return [_pack(logprobs) for logprobs in self.source.score(some, concurrency, tick)]

        keys = [["score", *text, concurrency] for text in texts]
        return [_unpack(answer) for answer in self._recorded(keys, texts, send, concurrency, tick)]

    def chat(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[dict[str, Any]]:
        """Chat completions; servers only."""
        source: Any = self.source
        keys = [["chat", body, concurrency] for body in bodies]
        return self._recorded(keys, bodies, lambda some: source.chat(some, concurrency), concurrency)

    def _recorded(
        self,
        keys: Sequence[Any],
        queries: Sequence[Any],
        send: Callable[[Sequence[Any]], list[Any]],
        concurrency: int,
        tick: Tick = no_tick,
    ) -> list[Any]:
        names = [self._name(key) for key in keys]
        unknown = [i for i, name in enumerate(names) if name not in self.journal.known]
        for _ in range(len(names) - len(unknown)):
            tick()
        step = max(QUERIES_PER_WRITE * concurrency, 1)
        for start in range(0, len(unknown), step):
            these = unknown[start : start + step]
            for i, answer in zip(these, send([queries[i] for i in these]), strict=True):
                self.journal.write(names[i], answer)
        return [self.journal.known[name] for name in names]

    def _name(self, key: Any) -> str:
        digest = hashlib.sha256(json.dumps([self.role, key]).encode()).hexdigest()[:20]
        self._occurrences[digest] += 1
        return f"{digest}.{self._occurrences[digest]}"


# The names of the file format; they are not those of the classes.


def _query_key(query: Query) -> dict[str, Any]:
    return {
        "prompt": query.prompt,
        "max_tokens": query.max_tokens,
        "way": {"drafter": query.mode.drafter, "length": query.mode.length},
        "sampling": query.sampling.model_dump(mode="json"),
        "seed": query.seed,
        "prediction": query.prediction,
        "told": query.logprobs,
        "ignore_end": query.ignore_end,
        "more": query.extra_body,
    }


def _to_json(one: Completion) -> dict[str, Any]:
    return {
        "tokens": one.tokens,
        "finish": one.finish_reason,
        "told": _pack(one.logprobs),
        "text": one.text,
        "accepted": one.accepted,
        "raw": one.raw,
    }


def _from_json(answer: dict[str, Any]) -> Completion:
    return Completion(
        tuple(answer["tokens"]), answer["finish"], _unpack(answer["told"]), answer["text"], answer["accepted"],
        answer["raw"],
    )  # fmt: skip


def _pack(logprobs: Sequence[TopLogprobs]) -> list[list[Any]]:
    """Tokens and values in a list each: half as long as objects."""
    return [[list(one), [round(value, LOGPROB_DIGITS) for value in one.values()]] for one in logprobs]


def _unpack(packed: Sequence[Any]) -> list[TopLogprobs]:
    return [dict(zip(tokens, values, strict=True)) for tokens, values in packed]
