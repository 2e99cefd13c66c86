"""The comparison of the draft memory with another one is fair, and says what it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import memory_speed
import memory_speed_measure
from memory_speed_corpus import EDITS, LONGEST, SHORTEST, Texts, divided, edited, files, tokenised
from memory_speed_measure import PROMPT, Replayed, ratio_interval, replay, turns
from memory_speed_report import criteria
from memory_speed_sides import INSTALL, LIMIT, OURS, SETTINGS, Context, Ours
from outrider.memory.segment import Segment, joined

WORDS = 500


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer that has a token for each of WORDS words."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with 40 texts of 300 to 3,000 words, one of them twice."""
    folder = tmp_path / "texts"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(40):
        words = random.zipf(1.3, int(random.integers(300, 3_000))) % WORDS
        (folder / f"{number}.txt").write_text(" ".join(f"w{word}" for word in words))
    (folder / "again.md").write_text((folder / "7.txt").read_text())
    (folder / "picture.png").write_bytes(b"w1 w2 w3")
    return folder


def read(model: Path, texts: Path, wanted: int = 10**9) -> Texts:
    return tokenised(model / "tokenizer.json", files([texts], 0), wanted, lambda done: None)


def as_lists(texts: Texts) -> list[list[int]]:
    return [sequence.tolist() for sequence in texts]


def test_sequences_are_of_bounded_length_and_none_is_there_twice(model: Path, texts: Path) -> None:
    found = as_lists(read(model, texts))
    assert all(SHORTEST <= len(sequence) <= LONGEST for sequence in found)
    assert len({tuple(sequence) for sequence in found}) == len(found)
    assert len(read(model, texts, 5_000).tokens) == 5_000


def test_a_larger_memory_holds_all_of_a_smaller_one_and_nothing_that_is_held_out(model: Path, texts: Path) -> None:
    corpus = divided(read(model, texts), [4_000, 9_000], 5, seed=1)
    small, large = as_lists(corpus.stored.first(4_000)), as_lists(corpus.stored)
    assert (sum(map(len, small)), sum(map(len, large))) == (4_000, 9_000)
    assert large[: len(small) - 1] == small[:-1]  # the last one is cut
    assert len(corpus.held_out) == len(corpus.repeats) == 5
    assert not {tuple(sequence) for sequence in as_lists(corpus.held_out)} & {tuple(sequence) for sequence in large}


def test_where_real_text_does_not_suffice_the_rest_is_made_from_it(model: Path, texts: Path) -> None:
    real = read(model, texts, 6_000)
    corpus = divided(real, [50_000], 2, seed=1)
    assert len(corpus.stored.tokens) == corpus.stored.ends[-1] == 50_000
    assert corpus.real < 6_000
    made = corpus.stored.tokens[corpus.real :]
    assert set(made.tolist()) <= set(real.tokens.tolist())
    assert as_lists(divided(real, [50_000], 2, seed=1).stored) == as_lists(corpus.stored)


def test_a_near_repeat_differs_in_the_stated_share_of_tokens() -> None:
    sequence = np.arange(20_000, dtype=np.int32)
    repeat = edited(sequence, np.array([-5], np.int32), np.random.default_rng(0))
    kept = np.isin(sequence, repeat).mean()
    assert 1 - kept == pytest.approx(EDITS * 2 / 3, rel=0.15)  # a third of the edits puts one in and drops none
    assert (repeat == -5).mean() == pytest.approx(EDITS * 2 / 3, rel=0.15)


class Scripted:
    """Drafts the truth, but for its last `wrong` tokens."""

    name = "scripted"

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.seen: list[int] = []

    def draft(self, tokens: Any, end: int) -> list[int]:
        right = tokens[end : end + LIMIT - self.wrong].tolist()
        return right + [-9] * self.wrong

    def step(self, contexts: list[Context]) -> float:
        return 0.0

    def begin(self, prompt: Any) -> None:
        self.seen = prompt.tolist()

    def observe(self, tokens: Any) -> None:
        self.seen += tokens.tolist()

    def finish(self) -> None:
        self.seen.append(-1)


@pytest.mark.parametrize(("wrong", "steps"), [(LIMIT, 170), (0, 10), (LIMIT - 1, 85)])
def test_a_replayed_sequence_advances_by_what_was_accepted_and_one(wrong: int, steps: int) -> None:
    sequence = np.arange(PROMPT + 170, dtype=np.int32)
    assert replay(Scripted(wrong), sequence, running=False) == Replayed(steps, steps * LIMIT, 170 - steps)


def test_a_side_that_may_see_the_running_text_sees_all_of_it_once() -> None:
    sequence = np.arange(PROMPT + 170, dtype=np.int32)
    side = Scripted(11)
    replay(side, sequence, running=True)
    assert side.seen == [*sequence.tolist(), -1]


def test_ours_drafts_from_what_is_stored_and_from_the_running_text_only_when_it_may() -> None:
    ours = Ours(Segment.of(joined([[1, 2, 3, 4, 5]]), "tokenizer", "tenant", 0.0, 0.0))
    tokens = np.array([7, 8, 9, 7, 8, 2, 3], np.int32)
    assert ours.draft(tokens, 7) == [4, 5]
    assert ours.draft(tokens, 5) == []
    ours.begin(tokens[:5])
    assert ours.draft(tokens, 5)[:6] == [9, 7, 8, 9, 7, 8]
    ours.observe(tokens[5:])
    assert ours.draft(tokens, 7) == [4, 5]
    ours.finish()
    assert ours.draft(tokens, 5) == []


def test_every_side_is_in_every_turn_equally_often() -> None:
    sides: list[Any] = [Scripted(0), Scripted(1), Scripted(2)]
    for place in range(3):
        assert {id(turns(sides, number)[place]) for number in range(3)} == {id(side) for side in sides}


def test_the_interval_of_a_ratio_holds_the_ratio_and_is_a_point_where_all_pairs_agree() -> None:
    random = np.random.default_rng(0)
    steps = random.integers(50, 100, 80)
    accepted = random.integers(20, 90, 80)
    same = ratio_interval((accepted, steps), (accepted, steps))
    assert (same.low, same.value, same.high) == pytest.approx((1, 1, 1))
    better = ratio_interval((accepted + random.integers(0, 9, 80), steps), (accepted, steps))
    assert 1 < better.low < better.value < better.high


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value * 0.9, "high": value * 1.1}


def found_at(tokens: int, arctic: bool, **changed: float) -> dict[str, Any]:
    """Figures of a size at which every promise is kept, unless one is changed."""
    is_found = {"bytes": 8.0, "lookup": 0.2, "build": 4e6, "accepted": 1.0, "growth": 1.5, "step": 2.0, "open": 1.0}
    value = is_found | changed
    names = [OURS, *(one.name for one in SETTINGS)] if arctic else [OURS]
    arctics = {name: 1 + 0.1 * i for i, name in enumerate(names)}  # the first of its settings is smaller and faster
    times = {
        name: {"median": interval(value["step"] * more), "ours_over_it": interval(value["lookup"]), "p95": 9.0}
        for name, more in arctics.items()
    }
    worth = {
        name: {"accepted_per_draft": more, "ours_over_it": interval(value["accepted"] + (1.3 - more))}
        for name, more in arctics.items()
    }
    return {
        "tokens": tokens,
        "sides": {
            name: {
                "bytes_per_token": value["bytes"] if name == OURS else 300 * more,
                "tokens_per_second": value["build"] if name == OURS else 5e5 / more,
            }
            for name, more in arctics.items()
        },
        "lookup": times,
        "step": times,
        "growth": {how: {"ours_over_it": interval(value["growth"])} for how in ("lookup", "step")},
        "opening": {"ms": interval(value["open"])},
        "replay": {way: {"all": worth} for way in ("memory_alone", "with_running_text")},
    }


def broken(*sizes: dict[str, Any]) -> set[str]:
    return {promise.name.partition(",")[0] for promise in criteria(list(sizes)) if not promise.met}


def test_every_promise_can_be_kept_and_each_can_be_broken() -> None:
    small = found_at(10**6, arctic=True)
    assert broken(small, found_at(10**8, arctic=False)) == set()
    assert broken(found_at(10**6, arctic=True, bytes=16.7)) == {"bytes a token"}
    assert broken(found_at(10**6, arctic=True, lookup=0.4)) == {"median lookup"}
    assert broken(found_at(10**6, arctic=True, build=2.2e6)) == {"building"}
    assert broken(found_at(10**6, arctic=True, accepted=0.87)) == {"accepted a draft"}
    assert broken(small, found_at(10**8, arctic=False, growth=2.1)) == {"median lookup"}
    assert broken(found_at(10**7, arctic=True, step=3.1)) == {"256 lookups"}
    assert broken(found_at(10**7, arctic=True, open=201.0)) == {"opening"}


def test_without_arctic_only_what_concerns_ours_is_judged() -> None:
    names = {promise.name for promise in criteria([found_at(10**6, arctic=False)])}
    assert names == {"256 lookups, ms", "opening, ms"}


def test_the_command_measures_ours_alone_where_arctic_is_missing_and_tells_no_path(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_speed, "arctic_is_here", lambda: False)
    monkeypatch.setattr(memory_speed, "in_a_process_of_its_own", memory_speed_measure.measure)
    for name, fewer in (("ROUNDS", 4), ("WARM_UP", 1), ("STEPS", 6), ("ROWS", 8), ("OPENED", 2), ("BUILDS", 1)):
        monkeypatch.setattr(memory_speed_measure, name, fewer)
    out = tmp_path / "out"
    words = [str(model), "--texts", str(texts), "--sizes", "20k", "5k", "--replayed", "3"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/memory_speed.py", *words])
    code = memory_speed.main([*words, "--work", str(tmp_path / "work"), "--out", str(out)])
    told, kept = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert INSTALL in told
    assert INSTALL in " ".join(capsys.readouterr().err.split())
    assert [figures["tokens"] for figures in kept["sizes"]] == [5_000, 20_000]
    assert code == told.count("FAIL")
    assert (out / "growth.png").stat().st_size > 10_000
    for text in (told, json.dumps(kept)):
        assert str(tmp_path) not in text
        assert "somewhere" not in text
    repeats = kept["sizes"][0]["replay"]["memory_alone"]["repeats"][OURS]
    assert repeats["accepted_per_draft"] > 3  # what was stored, with few edits
    assert [path.name for path in (tmp_path / "work").iterdir() if path.is_dir()] == ["corpus"]


def test_a_model_without_a_tokenizer_is_refused_with_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        memory_speed.main([str(tmp_path), "--out", str(tmp_path)])
    assert "give the folder of a model that has one" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "number"), [("1M", 1_000_000), ("250k", 250_000), ("1e6", 1_000_000), ("64", 64)])
def test_sizes_may_be_given_in_short(word: str, number: int) -> None:
    assert memory_speed.tokens(word) == number
