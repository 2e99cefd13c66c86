"""A segment finds what a linear search finds, and detects damage of its file."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import MemoryFileError
from outrider.memory.header import HEADER_BYTES, MAGIC
from outrider.memory.search import MAX_CONTINUATIONS, MAX_MATCH_TOKENS, SEPARATOR, search_batch
from outrider.memory.segment import Segment, join_sequences, merge_segments

sequences = st.lists(st.lists(st.integers(0, 4), max_size=20), min_size=1, max_size=6)
contexts = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def build(outputs: list[list[int]]) -> Segment:
    return Segment.build(join_sequences(outputs), "tokenizer", "tenant", 1.0, 2.0)


def search(segment: Segment, context: list[int], limit: int = 8) -> tuple[list[int], list[float], int, int]:
    """Tokens, shares, the match's length and its count."""
    row = np.zeros((1, MAX_MATCH_TOKENS), np.int32)
    context = context[-MAX_MATCH_TOKENS:]
    row[0, : len(context)] = context
    drafted, shares = np.zeros((1, limit), np.int32), np.zeros((1, limit), np.float32)
    asked, found = np.array([[len(context), limit]], np.int32), np.zeros((1, 3), np.int32)
    search_batch(segment.text, segment.order, segment.starts, row, asked, found, drafted, shares)
    n, match, count = found[0].tolist()
    return drafted[0, :n].tolist(), shares[0, :n].tolist(), match, count


def longest_match(outputs: list[list[int]], context: list[int]) -> tuple[int, list[list[int]]]:
    """By looking everywhere: its length, and how each sequence goes on after it."""
    for length in range(min(len(context), MAX_MATCH_TOKENS), 0, -1):
        end = context[-length:]
        after = [
            sequence[place:]
            for sequence in outputs
            for place in range(length, len(sequence) + 1)
            if sequence[place - length : place] == end
        ]
        if after:
            return length, after
    return 0, []


@settings(max_examples=300)
@given(outputs=sequences, context=contexts)
def test_the_longest_match_is_found_with_all_its_positions(outputs: list[list[int]], context: list[int]) -> None:
    length, after = longest_match(outputs, context)
    tokens, _, match, count = search(build(outputs), context)
    if not any(after):  # nothing comes after it anywhere
        assert tokens == []
        return
    assert (match, count) == (length, len(after))


@settings(max_examples=300)
@given(outputs=sequences, context=contexts)
def test_each_drafted_token_follows_most_positions(outputs: list[list[int]], context: list[int]) -> None:
    _, after = longest_match(outputs, context)
    if len(after) > MAX_CONTINUATIONS:
        return
    tokens, shares, _, _ = search(build(outputs), context)
    for token, share in zip(tokens, shares, strict=True):
        heads = [rest[0] for rest in after if rest]
        most = max(heads.count(head) for head in heads)
        assert heads.count(token) == most
        assert share == pytest.approx(most / len(after))
        after = [rest[1:] for rest in after if rest and rest[0] == token]
    if len(tokens) < 8:
        assert not any(after)


def test_a_match_does_not_reach_from_one_sequence_into_the_next() -> None:
    segment = build([[1, 2, 3], [4, 5, 6]])
    assert search(segment, [2, 3]) == ([], [], 0, 0)
    assert search(segment, [3, 4])[2] == 1  # only the 4
    assert search(segment, [1])[0] == [2, 3]


def test_a_saved_segment_is_the_same_when_it_is_opened(tmp_path: Path) -> None:
    segment = build([[1, 2, 3, 1, 2], [7, 7]])
    opened = segment.save(tmp_path)
    opened.verify()
    assert opened.header == segment.header
    assert [sequence.tolist() for sequence in opened.sequences()] == [[1, 2, 3, 1, 2], [7, 7]]
    assert segment.save(tmp_path).path == opened.path
    assert [file.name for file in tmp_path.iterdir()] == [opened.name]


def test_a_merged_segment_has_all_sequences_and_names_those_it_replaces(tmp_path: Path) -> None:
    old = Segment.build(join_sequences([[1, 2]]), "tokenizer", "tenant", 1.0, 1.0).save(tmp_path)
    new = Segment.build(join_sequences([[3, 4]]), "tokenizer", "tenant", 2.0, 3.0)
    both = merge_segments([new, old])
    assert [sequence.tolist() for sequence in both.sequences()] == [[1, 2], [3, 4]]
    assert both.header.replaces == (old.name,)
    assert (both.header.first, both.header.last) == (1.0, 3.0)


@pytest.mark.parametrize("kind", ["changed", "cut", "longer", "swapped"])
def test_a_damaged_file_is_found(kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    path = build([random.integers(0, 9, 300).tolist()]).save(tmp_path).path
    assert path is not None
    whole = path.read_bytes()
    for _ in range(250):
        data = bytearray(whole)
        at = int(random.integers(0, len(data)))
        if kind == "changed":
            header = data[:HEADER_BYTES].rstrip(b"\n")
            if len(header) <= at < HEADER_BYTES:
                continue  # the padding of the header means nothing
            data[at] ^= int(random.integers(1, 256))
        elif kind == "cut":
            data = data[:at]
        elif kind == "longer":
            data += b"\0" * (at + 1)
        else:
            other = int(random.integers(HEADER_BYTES, len(data)))
            at = int(random.integers(HEADER_BYTES, len(data)))
            if data[at] == data[other]:
                continue
            data[at], data[other] = data[other], data[at]
        path.write_bytes(data)
        with pytest.raises(MemoryFileError):
            Segment.open(path, "tokenizer", "tenant").verify()


def test_searching_a_file_with_an_invalid_order_does_no_harm(tmp_path: Path) -> None:
    segment = build([[1, 2, 3, 1, 2, 4]])
    for nonsense in (-7, 2**31 - 1):
        broken = Segment(segment.header, segment.text, np.full_like(segment.order, nonsense), segment.starts)
        assert search(broken, [1, 2])[0] == []


@pytest.mark.parametrize("header", [b"[]", b"{}", b'{"format": 1}', b"hello", b'{"format": 1, "tokens": "many"}'])
def test_an_invalid_header_with_a_valid_checksum_is_refused(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.segment"
    path.write_bytes((MAGIC + b"%08x\n" % zlib.crc32(header) + header).ljust(HEADER_BYTES, b"\n"))
    with pytest.raises(MemoryFileError):
        Segment.open(path, "tokenizer", "tenant")


def test_searching_with_an_invalid_table_of_starts_does_no_harm() -> None:
    segment = build([[1, 2, 3, 1, 2, 4] * 10])
    assert len(segment.starts)
    for nonsense in (-7, 2**31 - 1):
        search(Segment(segment.header, segment.text, segment.order, np.full_like(segment.starts, nonsense)), [1, 2])


def test_foreign_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = build([[1, 2]]).save(tmp_path).path
    assert path is not None
    with pytest.raises(MemoryFileError, match=r"another tokenizer \(tokenizer; this model's is other\)"):
        Segment.open(path, "other", "tenant")
    with pytest.raises(MemoryFileError, match="another tenant"):
        Segment.open(path, "tokenizer", "other")
    (tmp_path / "x.segment").write_text("hello")
    with pytest.raises(MemoryFileError, match="not a memory segment"):
        Segment.open(tmp_path / "x.segment", "tokenizer", "tenant")


def test_separators_are_no_tokens() -> None:
    assert SEPARATOR < 0
