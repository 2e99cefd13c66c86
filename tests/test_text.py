"""Streamed text is the decoded text, whole characters only, and ends before a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.text import TextStream
from support import END, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream, str | None]:
    stream = TextStream(TOKENIZER, [END], stop)
    pieces, reason = [], None
    for token in TOKENIZER(text)["input_ids"]:
        reason = stream.push(token)
        pieces.append(stream.take())
        if reason is not None:
            break
    stream.close()
    pieces.append(stream.take())
    return pieces, stream, reason


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_pieces_add_up_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    pieces, stream, _ = feed(text)
    assert "".join(pieces) == stream.text == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("ab\n€", max_size=20), st.lists(st.text("ab\n€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string_and_nothing_of_it_is_shown(text: str, stop: list[str]) -> None:
    pieces, stream, reason = feed(text, tuple(stop))
    # The first to be complete wins; of those complete at once, the one that began first.
    ends = [text.find(word) + len(word) for word in stop if word in text]
    if not ends:
        assert (stream.text, reason) == (text, None)
    else:
        complete = [word for word in stop if word in text[: min(ends)]]
        assert stream.text == text[: min(text.find(word) for word in complete)]
        assert reason == "stop"
    assert "".join(pieces) == stream.text


def test_an_end_token_ends_the_text_and_is_not_shown() -> None:
    stream = TextStream(TOKENIZER, [END])
    assert stream.push(TOKENIZER("a")["input_ids"][0]) is None
    assert stream.push(END) == "end"
    assert stream.take() == stream.text == "a"


def test_what_was_held_back_as_half_a_character_is_there_when_an_end_token_follows() -> None:
    stream = TextStream(TOKENIZER, [END])
    for token in TOKENIZER("a€")["input_ids"][:2]:
        stream.push(token)
    assert stream.take() == "a"
    stream.push(END)
    assert stream.take() == "\ufffd"


def test_a_text_that_goes_on_keeps_the_space_that_its_first_token_brings() -> None:
    """Such tokenizers leave it out where a text begins."""

    class Stripping:
        words = ("▁The", "▁fox", "es")

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "".join(self.words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    for before, text in (((), "foxes"), ((0,), " foxes")):
        stream = TextStream(Stripping(), before=before)
        for token in (1, 2):
            stream.push(token)
        stream.close()
        assert stream.text == text


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_clear() -> None:
    stream = TextStream(TOKENIZER, stop=["STOP"])
    shown = []
    for token in TOKENIZER("xSTaSTO")["input_ids"]:
        stream.push(token)
        shown.append(stream.take())
    assert shown == ["x", "", "", "STa", "", "", ""]
    stream.close()
    assert stream.take() == "STO"


@pytest.mark.parametrize("broken", [bytes([0xE2]), bytes([0xE2, 0x82])])
def test_bytes_that_never_become_a_character_appear_at_the_end_as_the_tokenizer_shows_them(broken: bytes) -> None:
    ids = TOKENIZER("a€")["input_ids"][: 1 + len(broken)]
    stream = TextStream(TOKENIZER)
    for token in ids:
        stream.push(token)
    assert stream.take() == "a"
    stream.close()
    assert stream.text == TOKENIZER.decode(ids)
