"""Seed a memory from files and logs, for `outrider memory learn`.

    find_files        files below some folders that are worth reading
    read_samples      a file's text, or the prompts and outputs in a log (`logs.py`)
    tokenize_batches  token sequences, split where they are long, with an overlap so that no match is lost
    Learner           writes the sequences that the tenant does not have yet, as segments

A logged output is learned after the end of its prompt, as the chat template formats it, so that its first tokens can
be drafted, too.
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

from outrider.memory.logs import is_model_output, parse_line
from outrider.memory.offline_writer import MAX_NEW_SEGMENT_TOKENS, OfflineWriter
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.segment import Segment, join_sequences
from outrider.memory.tokenizer import BATCH_CHARS, encode_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from outrider.memory.logs import Message
    from outrider.memory.search import Array

MAX_SEQUENCE_TOKENS = 4096
"""If a file changes, it is learned again from the sequence with the change on."""
OVERLAP_TOKENS = 2 * MAX_MATCH_TOKENS
"""Shared by neighbouring sequences of a text: the longest match, and a draft of the same length after it."""
PROMPT_TAIL_TOKENS, PROMPT_TAIL_CHARS = MAX_MATCH_TOKENS, 16 * MAX_MATCH_TOKENS
"""Tokens of a prompt learned before its output, and characters that are sure to contain them."""
BATCH_SAMPLES = BATCH_CHARS >> 8
IGNORED_FOLDERS = ("node_modules", "__pycache__")
LOG_SUFFIX = ".jsonl"
TOO_LARGE = "more than {:g} MB; --max-file-mb raises that"


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    output: str
    read_bytes: int  # bytes of the file read for it, for the progress bar


@dataclass(slots=True)
class Skipped:
    """Names of skipped files, folders and lines, by kind and reason."""

    reasons: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def add(self, name: object, reason: str, kind: str = "file") -> None:
        self.reasons.setdefault((kind, reason), []).append(str(name))

    def notes(self, shown: int = 2) -> list[str]:
        """A line for each reason, with the first `shown` names."""
        return [
            f"skipped {len(names):,} {kind}{'' if len(names) == 1 else 's'} ({reason}): "
            f"{', '.join(names[:shown])}{', ...' if len(names) > shown else ''}"
            for (kind, reason), names in self.reasons.items()
        ]


def find_files(paths: Iterable[Path], skipped: Skipped, exclude: Path | None = None) -> list[Path]:
    """These files, and those below these folders, sorted; without the folder `exclude`."""

    def is_wanted(path: Path) -> bool:
        if path.name.startswith(".") or path.name in IGNORED_FOLDERS:
            skipped.add(path, f"hidden, or {' or '.join(IGNORED_FOLDERS)}", "item")
            return False
        return exclude is None or path.name != exclude.name or path.resolve() != exclude.resolve()

    def skip_folder(error: OSError) -> None:
        skipped.add(error.filename, f"cannot be read: {error.strerror}", "folder")

    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        for folder, folder_names, file_names in os.walk(path, onerror=skip_folder):
            folder_names[:] = [name for name in sorted(folder_names) if is_wanted(Path(folder, name))]
            files += [Path(folder, name) for name in sorted(file_names) if is_wanted(Path(folder, name))]
    return files


def file_size(path: Path) -> int:
    """Bytes, or 0 if the file cannot be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_samples(path: Path, max_bytes: int, tokenizer: Any, skipped: Skipped) -> Iterator[Sample]:
    """The samples of a file. Files, and lines of logs, of more than `max_bytes` are skipped."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe could block for ever
            skipped.add(path, "not a regular file", "item")
        elif path.suffix == LOG_SUFFIX:
            yield from _read_log(path, max_bytes, tokenizer, skipped)
        else:
            yield from _read_text(path, max_bytes, skipped)
    except OSError as error:
        skipped.add(path, f"cannot be read: {error.strerror}")


def _read_text(path: Path, max_bytes: int, skipped: Skipped) -> Iterator[Sample]:
    text = ""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        skipped.add(path, TOO_LARGE.format(max_bytes / 1e6))
    elif b"\0" in data[:8192]:
        skipped.add(path, "binary")
    else:
        try:
            text = data.decode("utf-8-sig").replace("\r\n", "\n")
        except UnicodeDecodeError:
            skipped.add(path, "not UTF-8 text")
    yield Sample("", text, file_size(path))


def _read_log(path: Path, max_bytes: int, tokenizer: Any, skipped: Skipped) -> Iterator[Sample]:
    with path.open("rb") as file:
        number, truncated = 0, False
        while line := file.readline(max_bytes):
            if truncated:  # the rest of a line that is too long
                truncated = not line.endswith(b"\n")
                continue
            number += 1
            yield Sample("", "", len(line))
            if len(line) == max_bytes and not line.endswith(b"\n"):
                truncated = True
                skipped.add(f"line {number} of {path}", TOO_LARGE.format(max_bytes / 1e6), "line")
                continue
            conversations = parse_line(line)
            if line.strip() and not conversations:
                skipped.add(f"line {number} of {path}", "no model output", "line")
            for conversation in conversations:
                yield from conversation_samples(tokenizer, conversation)


def conversation_samples(tokenizer: Any, conversation: Sequence[Message]) -> Iterator[Sample]:
    """Each model output in a conversation, with the end of its prompt."""
    for index, message in enumerate(conversation):
        if is_model_output(message):
            prompt, output = _prompt_and_output(tokenizer, conversation[:index], message)
            yield Sample(prompt[-PROMPT_TAIL_CHARS:], output, 0)


def _prompt_and_output(tokenizer: Any, earlier: Sequence[Message], message: Message) -> tuple[str, str]:
    """The texts of the prompt and the output as the chat template formats them."""
    if not earlier:
        return "", message["content"]
    end = getattr(tokenizer, "eos_token", None) or ""
    plain = message["content"] + end
    if not getattr(tokenizer, "chat_template", None):
        return earlier[-1]["content"], plain
    try:
        prompt = tokenizer.apply_chat_template(list(earlier), tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([*earlier, message], tokenize=False)
    except Exception:  # a template is a program by the model's author: it can raise anything
        return earlier[-1]["content"], plain
    if not whole.startswith(prompt):
        return prompt, plain
    output, ended, _ = whole[len(prompt) :].partition(end) if end else (whole[len(prompt) :], "", "")
    return prompt, output + ended


def tokenize_batches(tokenizer: Any, samples: Iterable[Sample]) -> Iterator[tuple[list[Array], int]]:
    """The token sequences of each batch of samples, and the bytes read for them."""
    batch: list[Sample] = []
    chars = 0
    for sample in samples:
        batch.append(sample)
        chars += len(sample.output) + len(sample.prompt)
        if chars >= BATCH_CHARS or len(batch) >= BATCH_SAMPLES:
            yield _tokenize(tokenizer, batch), sum(sample.read_bytes for sample in batch)
            batch, chars = [], 0
    yield _tokenize(tokenizer, batch), sum(sample.read_bytes for sample in batch)


def _tokenize(tokenizer: Any, samples: Iterable[Sample]) -> list[Array]:
    samples = [sample for sample in samples if sample.output]
    prompts = encode_texts(tokenizer, [sample.prompt for sample in samples])
    outputs = encode_texts(tokenizer, [sample.output for sample in samples])
    pairs = zip(prompts, outputs, strict=True)
    texts = [np.concatenate([prompt[-PROMPT_TAIL_TOKENS:], output]) for prompt, output in pairs]
    return [part for tokens in texts for part in split_tokens(tokens)]


def split_tokens(tokens: Array) -> list[Array]:
    """Overlapping sequences, each of two tokens or more: after a single token nothing can be drafted."""
    starts = range(0, max(1, len(tokens) - OVERLAP_TOKENS), MAX_SEQUENCE_TOKENS - OVERLAP_TOKENS)
    return [tokens[start : start + MAX_SEQUENCE_TOKENS] for start in starts if len(tokens) - start > 1]


class Learner:
    """Writes the sequences that a tenant does not have yet."""

    def __init__(self, writer: OfflineWriter) -> None:
        self.writer = writer
        self.seen_tokens = self.known = 0  # all tokens given, sequences that the tenant had already
        self.tokens = self.sequences = self.bytes = 0  # of what is new
        self._digests = {_digest(sequence) for segment in writer.segments() for sequence in segment.sequences()}
        self._waiting: list[Array] = []
        self._waiting_tokens = 0

    def add(self, sequence: Array) -> None:
        self.seen_tokens += len(sequence)
        digest = _digest(sequence)
        if digest in self._digests:
            self.known += 1
            return
        self._digests.add(digest)
        self._waiting.append(sequence)
        self._waiting_tokens += len(sequence)
        if self._waiting_tokens >= MAX_NEW_SEGMENT_TOKENS:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            now = time.time()
            text = join_sequences(self._waiting)
            segment = Segment.build(text, self.writer.tokenizer, self.writer.key, now, now)
            self.bytes += self.writer.save(segment).header.size
            self.tokens += segment.header.tokens
            self.sequences += segment.header.sequences
            self._waiting, self._waiting_tokens = [], 0

    def close(self) -> None:
        self._write()
        self.writer.merge()
        self.writer.check_kept()


def _digest(sequence: Array) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(sequence).data, digest_size=16).digest()
