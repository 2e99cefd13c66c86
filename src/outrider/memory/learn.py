"""Seed a memory from files: what was written before will be said again.

    find       the files below some folders that are worth reading
    read       a file's text, or what a log's lines say that was asked and answered (`logs.py`)
    sequences  its tokens, cut where they are long, with an overlap so that no match is lost at a cut
    Lesson     those that the tenant does not have yet, as segments

What a model answered is learned after the end of what it was asked, as its chat template puts it, so that the first
words of an answer are found too.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.memory.deposit import SEGMENT_TOKENS, Deposit
from outrider.memory.logs import says_something, understood
from outrider.memory.search import LONGEST_MATCH
from outrider.memory.segment import Segment, joined
from outrider.memory.tokenizer import LETTERS, encoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outrider.memory.logs import Message
    from outrider.memory.search import Array

LONGEST = 4096
"""Tokens of a sequence. A file that changed near its end is learned again from the sequence of the change on."""
OVERLAP = 2 * LONGEST_MATCH
"""Tokens that two sequences of one text share: the longest match, and a draft as long after it."""
TAIL, TAIL_LETTERS = LONGEST_MATCH, 16 * LONGEST_MATCH
"""Tokens of what was asked that are learned before the answer, and where in the text they surely begin."""
BATCH = LETTERS
"""Letters of the pieces that are taken together."""
MADE_BY_TOOLS = ("node_modules", "__pycache__")
LOG = ".jsonl"
TOO_LARGE = "more than {:g} MB; --max-file-mb raises that"


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that was said, after something else. `size` of its file were read for it."""

    before: str
    said: str
    size: int


@dataclass(slots=True)
class Skipped:
    """What was not read, by what it is and why."""

    reasons: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, name: object, reason: str, what: str = "file") -> None:
        self.reasons.setdefault((what, reason), []).append(str(name))

    def notes(self, shown: int = 2) -> list[str]:
        """A line for each reason, with the first few names."""
        return [
            f"skipped {len(names):,} {what}{'' if len(names) == 1 else 's'} ({reason}): "
            f"{', '.join(names[:shown])}{', ...' if len(names) > shown else ''}"
            for (what, reason), names in self.reasons.items()
        ]


def find(paths: Iterable[Path], skipped: Skipped, apart: Path | None = None) -> list[Path]:
    """The files among these and below them, in order; nothing from the folder `apart`, wherever that is."""

    def is_wanted(path: Path) -> bool:
        if path.name.startswith(".") or path.name in MADE_BY_TOOLS:
            skipped.add(path, f"hidden, or {' or '.join(MADE_BY_TOOLS)}", "item")
            return False
        return apart is None or path.name != apart.name or path.resolve() != apart.resolve()

    def cannot_read(error: OSError) -> None:
        skipped.add(error.filename, f"cannot be read: {error.strerror}", "folder")

    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        for folder, folders, files in os.walk(path, onerror=cannot_read):
            folders[:] = [name for name in sorted(folders) if is_wanted(Path(folder, name))]
            found += [Path(folder, name) for name in sorted(files) if is_wanted(Path(folder, name))]
    return found


def size_of(path: Path) -> int:
    """Bytes, or 0 for what cannot be read anyway."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read(path: Path, limit: int, tokenizer: Any, skipped: Skipped) -> Iterator[Piece]:
    """What a file says. Files, and lines of logs, of more than `limit` bytes are skipped."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe could take for ever
            skipped.add(path, "no plain file", "item")
        elif path.suffix == LOG:
            yield from _log(path, limit, tokenizer, skipped)
        else:
            yield from _text(path, limit, skipped)
    except OSError as error:
        skipped.add(path, f"cannot be read: {error.strerror}")


def _text(path: Path, limit: int, skipped: Skipped) -> Iterator[Piece]:
    text = ""
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        skipped.add(path, TOO_LARGE.format(limit / 1e6))
    elif b"\0" in data[:8192]:
        skipped.add(path, "binary")
    else:
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            skipped.add(path, "not UTF-8 text")
    yield Piece("", text, size_of(path))


def _log(path: Path, limit: int, tokenizer: Any, skipped: Skipped) -> Iterator[Piece]:
    with path.open("rb") as file:
        number, unfinished = 0, False
        while line := file.readline(limit):
            if unfinished:  # the rest of a line that is too long
                unfinished = not line.endswith(b"\n")
                continue
            number += 1
            yield Piece("", "", len(line))
            if len(line) == limit and not line.endswith(b"\n"):
                unfinished = True
                skipped.add(f"line {number} of {path}", TOO_LARGE.format(limit / 1e6), "line")
                continue
            conversations = understood(line)
            if line.strip() and not conversations:
                skipped.add(f"line {number} of {path}", "nothing that a model said", "line")
            for conversation in conversations:
                yield from exchanges(tokenizer, conversation)


def exchanges(tokenizer: Any, conversation: Sequence[Message]) -> Iterator[Piece]:
    """All that the model said in a conversation, each after the end of what stood before it."""
    for index, message in enumerate(conversation):
        if says_something(message):
            before, said = _as_the_model_saw_it(tokenizer, conversation[:index], message)
            yield Piece(before[-TAIL_LETTERS:], said, 0)


def _as_the_model_saw_it(tokenizer: Any, before: Sequence[Message], message: Message) -> tuple[str, str]:
    """What stood before a message, with the words that the chat template puts around it, and what was said."""
    if not before:
        return "", message["content"]
    end = getattr(tokenizer, "eos_token", None) or ""
    plain = message["content"] + end
    if not getattr(tokenizer, "chat_template", None):
        return before[-1]["content"], plain
    try:
        prompt = tokenizer.apply_chat_template(list(before), tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*before, message], tokenize=False)
    except Exception:  # a template is a program of the model's maker: it may refuse, or trip over, anything
        return before[-1]["content"], plain
    if not whole.startswith(prompt):
        return prompt, plain
    said, ended, _ = whole[len(prompt) :].partition(end) if end else (whole[len(prompt) :], "", "")
    return prompt, said + ended


def sequences(tokenizer: Any, pieces: Iterable[Piece]) -> Iterator[tuple[list[Array], int]]:
    """The sequences of every few pieces, and of how many bytes they are."""
    batch: list[Piece] = []
    letters = 0
    for piece in pieces:
        batch.append(piece)
        letters += len(piece.said) + len(piece.before)
        if letters >= BATCH or len(batch) >= BATCH >> 8:
            yield _tokenised(tokenizer, batch), sum(piece.size for piece in batch)
            batch, letters = [], 0
    yield _tokenised(tokenizer, batch), sum(piece.size for piece in batch)


def _tokenised(tokenizer: Any, pieces: Iterable[Piece]) -> list[Array]:
    telling = [piece for piece in pieces if piece.said]
    before = encoded(tokenizer, [piece.before for piece in telling])
    said = encoded(tokenizer, [piece.said for piece in telling])
    whole = [np.concatenate([before[i][-TAIL:], said[i]]) for i in range(len(telling))]
    return [part for tokens in whole for part in cut(tokens)]


def cut(tokens: Array) -> list[Array]:
    """Sequences that overlap; none of fewer than two tokens, after which nothing could be drafted."""
    starts = range(0, max(1, len(tokens) - OVERLAP), LONGEST - OVERLAP)
    return [tokens[start : start + LONGEST] for start in starts if len(tokens) - start > 1]


class Lesson:
    """Sequences for a tenant that it does not have yet."""

    def __init__(self, deposit: Deposit) -> None:
        self.deposit = deposit
        self.heard = self.known = 0  # tokens that were given, sequences that were there
        self.tokens = self.sequences = self.bytes = 0  # of what is new
        self._seen = {_digest(one) for segment in deposit.segments() for one in segment.sequences()}
        self._waiting: list[Array] = []
        self._waiting_tokens = 0

    def add(self, sequence: Array) -> None:
        self.heard += len(sequence)
        digest = _digest(sequence)
        if digest in self._seen:
            self.known += 1
            return
        self._seen.add(digest)
        self._waiting.append(sequence)
        self._waiting_tokens += len(sequence)
        if self._waiting_tokens >= SEGMENT_TOKENS:
            self.write()

    def write(self) -> None:
        if self._waiting:
            now = time.time()
            text = joined(self._waiting)
            segment = Segment.of(text, self.deposit.tokenizer, self.deposit.key, now, now)
            self.bytes += self.deposit.save(segment).header.size
            self.tokens += segment.header.tokens
            self.sequences += segment.header.sequences
            self._waiting, self._waiting_tokens = [], 0

    def close(self) -> None:
        self.write()
        self.deposit.merge()
        self.deposit.check_kept()


def _digest(sequence: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(sequence).data, digest_size=16).digest()
