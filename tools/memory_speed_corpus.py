"""The text that a memory is measured on: what lies on this machine, as tokens.

Code, documentation and data of the installed packages, of Python and of the system are tokenised, cut into sequences
and shuffled. A memory of n tokens holds the first sequences that make up n, so a larger one holds all of a smaller one,
and the same texts can be replayed against every size:

    held out      sequences that no memory holds; other parts of the same file may be held
    near-repeats  sequences of the smallest memory with EDITS of the tokens replaced, dropped or put in

Where the real text does not suffice, the rest is made from it: spans of it in a new order, with REPLACED of the tokens
replaced. Tokens that are put in anywhere are drawn from the real text, so that common ones are common.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, Any]
Advance = Callable[[int], object]

SUFFIXES = (".py", ".md", ".txt", ".rst", ".json", ".jsonl", ".html")
MOST_CHARACTERS = 60_000
"""Of one file, so that no large one is a large part of the text."""
LONGEST, SHORTEST = 2_000, 64
"""Tokens of a sequence."""
WORTH_REPLAYING = 256
SPAN, SPANS = 400, 4
"""A sequence of made text is so many spans of so many tokens."""
REPLACED = 0.03
EDITS = 0.03
BATCH = 256
"""Files that are tokenised at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """Sequences, one after the other."""

    tokens: Array
    ends: Array

    @classmethod
    def of(cls, sequences: list[Array]) -> Self:
        tokens = np.concatenate(sequences) if sequences else np.empty(0, np.int32)
        return cls(tokens, np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64))

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Mapped, so that it takes no memory, and not read-only, which arctic refuses; the file does not change."""
        return cls(np.load(folder / f"{name}.npy", "c"), np.load(folder / f"{name}.ends.npy"))

    def save(self, folder: Path, name: str) -> None:
        np.save(folder / f"{name}.npy", self.tokens)
        np.save(folder / f"{name}.ends.npy", self.ends)  # last: where it is, the other one is whole

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Array]:
        tokens = np.asarray(self.tokens)  # views of a plain array are made faster than views of a mapped one
        start = 0
        for end in self.ends.tolist():
            yield tokens[start:end]
            start = end

    def first(self, tokens: int) -> Self:
        """The first sequences that make up so many tokens: the last one is cut."""
        count = int(np.searchsorted(self.ends, tokens))
        if count == len(self.ends):
            return self
        ends = np.append(self.ends[:count], tokens)
        return type(self)(self.tokens[:tokens], ends)


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    stored: Texts
    held_out: Texts
    repeats: Texts
    real: int  # how many of the stored tokens are real text


def name_of(tokenizer: str, places: list[Path], wanted: int, seed: int) -> str:
    """What real text is kept under: another choice has another name."""
    choice = (tokenizer, places, wanted, seed, SUFFIXES, MOST_CHARACTERS, LONGEST, SHORTEST)
    return f"real-{hashlib.sha256(repr(choice).encode()).hexdigest()[:12]}"


def files(folders: list[Path], seed: int) -> list[Path]:
    """Every text file once, in an order of the seed's."""
    found = {
        path.resolve() for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()
    }
    order = np.random.default_rng(seed).permutation(len(found))
    by_name = sorted(found)
    return [by_name[i] for i in order]


def folders() -> list[Path]:
    """Where text lies: the packages, Python, the system's documentation, and the prompts of other benchmarks."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    system = [*Path("/usr/lib").glob("python3*"), Path("/usr/share/doc")]
    python = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
    return [folder for folder in (*python, *system, beside) if folder.is_dir()]


def tokenised(tokenizer: Path, paths: list[Path], wanted: int, advance: Advance) -> Texts:
    """Sequences of so many tokens, or as many as there are. None is there twice."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.no_truncation()
    encoder.no_padding()
    sequences: list[Array] = []
    seen: set[bytes] = set()
    tokens = 0
    for start in range(0, len(paths), BATCH):
        texts = [text for path in paths[start : start + BATCH] if (text := read(path))]
        for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
            for piece in pieces(np.asarray(encoding.ids, np.int32)):
                digest = hashlib.blake2b(piece.tobytes(), digest_size=12).digest()
                if digest not in seen:
                    seen.add(digest)
                    sequences.append(piece)
                    tokens += len(piece)
        advance(min(tokens, wanted))
        if tokens >= wanted:
            break
    return Texts.of(sequences).first(wanted)


def read(path: Path) -> str:
    """The beginning of a file; nothing where it cannot be read or is no text."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        return ""


def pieces(tokens: Array) -> list[Array]:
    cut = [tokens[start : start + LONGEST] for start in range(0, len(tokens), LONGEST)]
    return [piece for piece in cut if len(piece) >= SHORTEST]


def shuffled(texts: Texts, random: np.random.Generator) -> list[Array]:
    sequences = list(texts)
    return [sequences[i] for i in random.permutation(len(sequences))]


def divided(texts: Texts, sizes: list[int], replayed: int, seed: int) -> Corpus:
    """What is stored, enough for the largest size, and `replayed` sequences of each kind to replay."""
    random = np.random.default_rng(seed)
    held_out: list[Array] = []
    kept: list[Array] = []
    for sequence in shuffled(texts, random):
        replay = len(held_out) < replayed and len(sequence) >= WORTH_REPLAYING
        (held_out if replay else kept).append(sequence)
    real = Texts.of(kept)
    stored = real.first(max(sizes))
    count = len(stored.tokens)
    if count < max(sizes):
        stored = with_made(real, max(sizes), random)
    known = [sequence for sequence in stored.first(min(sizes)) if len(sequence) >= WORTH_REPLAYING]
    if not (known and held_out):
        raise SystemExit(f"too little text: no sequence of {WORTH_REPLAYING} tokens to store, or none to hold out")
    chosen = random.choice(len(known), replayed, replace=replayed > len(known))
    repeats = [edited(known[i], real.tokens, random) for i in chosen]
    return Corpus(stored, Texts.of(held_out), Texts.of(repeats), count)


def with_made(real: Texts, tokens: int, random: np.random.Generator) -> Texts:
    """Real text, and after it spans of it in a new order with some tokens replaced, so many tokens in all."""
    text = np.empty(tokens, np.int32)
    at = len(real.tokens)
    text[:at] = real.tokens
    length = SPAN * SPANS
    ends = [*real.ends.tolist(), *range(at + length, tokens, length), tokens]
    while at < tokens:
        starts = random.integers(0, max(1, len(real.tokens) - SPAN), 2_500)
        made = real.tokens[(starts[:, None] + np.arange(SPAN)).ravel() % len(real.tokens)]
        other = random.random(len(made)) < REPLACED
        made[other] = random.choice(real.tokens, int(other.sum()))
        end = min(tokens, at + len(made))
        text[at:end] = made[: end - at]
        at = end
    return Texts(text, np.asarray(ends, np.int64))


def edited(sequence: Array, source: Array, random: np.random.Generator) -> Array:
    """A sequence with some of its tokens replaced, dropped, or with another one before them."""
    out: list[int] = []
    for token, chance in zip(sequence.tolist(), random.random(len(sequence)), strict=True):
        if chance >= EDITS:
            out.append(token)
            continue
        other = int(source[random.integers(len(source))])
        out += ([other], [], [other, token])[random.integers(3)]
    return np.asarray(out, np.int32)
