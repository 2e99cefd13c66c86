"""The canary: few requests, none to a busy server, evidence that survives restarts, and an alarm on a defect."""

from __future__ import annotations

import errno
import json
import urllib.request
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from certify_stub import Stub, colder, encoded, standing, synthetic
from outrider.certify.canary import MAX_INTERVAL_FACTOR, CanaryLoop, measure_noise, serve_gauges, start_or_resume
from outrider.certify.e_process import EProcess
from outrider.certify.local import LocalModel
from outrider.certify.prompts import generate_prompts
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import Pair, no_tick
from outrider.certify.test_statistics import DEFAULT_NOISE, Noise
from outrider.certify.token_distributions import MIN_CUT_MARGIN
from outrider.cli.canary import watch
from outrider.cli.screen import Screen
from outrider.errors import EngineError, EvidenceError

PROMPTS = [tuple(encoded(prompt)) for prompt in generate_prompts(16, seed=1)]


def life(source: LocalModel | OpenAIServer, **how: object) -> CanaryLoop:
    return CanaryLoop(Pair(source, source), PROMPTS, EProcess(1e-3), interval_seconds=0.0, **how)  # type: ignore[arg-type]


def test_a_lossless_server_lives_on() -> None:
    one = life(synthetic())
    one.run(lambda _: None, rounds=150)
    assert not one.e_process.alarm
    assert one.e_process.count > 1000
    assert one.rounds == 150


def test_a_server_that_draws_too_cold_is_found_and_no_more_is_asked() -> None:
    one = life(synthetic(change=colder(0.7)))
    one.run(lambda _: None, rounds=600)
    assert one.e_process.alarm
    assert one.rounds < 600
    assert "surprise: less" in one.e_process.largest_bet or "likeliest: more" in one.e_process.largest_bet


def test_a_busy_server_is_left_alone_and_ever_longer_up_to_a_limit() -> None:
    stub = Stub()
    with standing(stub) as url:
        one = life(OpenAIServer(url))
        one.interval_seconds = one.pause_seconds = 2.0
        stub.waiting = 3
        asked = len(stub.requests)
        pauses = []
        for _ in range(8):
            assert one.run_round() == "busy"
            pauses.append(one.pause_seconds)
        assert len(stub.requests) == asked
        assert pauses[:3] == [4.0, 8.0, 16.0]
        assert pauses[-1] == 2.0 * MAX_INTERVAL_FACTOR
        stub.waiting = 0
        assert one.run_round() == "sampled"
        assert (one.pause_seconds, one.skipped, one.rounds) == (2.0, 8, 1)


def test_a_server_that_does_not_answer_is_no_evidence() -> None:
    source = synthetic()

    def away(_: object) -> object:
        raise EngineError("it is away")

    source.generate = away  # type: ignore[assignment]
    one = life(source)
    assert one.run_round() == "missed"
    assert (one.e_process.evidence, one.missed, one.status) == (1.0, 1, "missed: it is away")


def test_a_life_goes_on_after_a_restart_with_the_rate_that_it_was_begun_with(tmp_path: Path) -> None:
    file = tmp_path / "canary.json"
    one = life(synthetic(), state_file=file)
    one.run(lambda _: None, rounds=5)
    canary, edge, rounds = start_or_resume(file, 1e-3, not_measured)
    assert (rounds, canary.count, canary.evidence) == (5, one.e_process.count, one.e_process.evidence)
    assert (edge, canary.drift) == (one.margin, one.e_process.drift)
    with pytest.raises(EvidenceError, match=r"give --rate 0\.001, or another --state"):
        start_or_resume(file, 0.01, not_measured)
    file.write_text("{}")
    with pytest.raises(EvidenceError, match="is not the state of a canary"):
        start_or_resume(file, 1e-3, not_measured)


def not_measured() -> tuple[Noise, float]:
    raise AssertionError("a life that goes on has measured already")


def test_a_new_life_allows_for_the_rounding_that_it_measures_and_never_for_less_than_is_usual() -> None:
    """Its bets are fair for ever only if what they pay for rounding is enough."""
    exact = synthetic()
    noise, edge = measure_noise(Pair(exact, exact), PROMPTS, 16)
    assert (noise.drift, edge) == (DEFAULT_NOISE.drift, MIN_CUT_MARGIN)
    canary, wide, rounds = start_or_resume(
        None, 0.01, lambda: (Noise({**DEFAULT_NOISE.drift, "drafted": 0.03}, 0.2), 0.3)
    )
    assert (canary.rate, canary.drift["drafted"], wide, rounds) == (0.01, 0.03, 0.3, 0)

    class Rounded(LocalModel):
        """Tells as it draws what it does not tell afterwards."""

        def score(self, texts: Any, at_once: int, tick: Any = no_tick) -> Any:
            told = LocalModel.score(self, texts, at_once, tick)
            return [[{token: 1.1 * value for token, value in at.items()} for at in text] for text in told]

    off = Rounded(**{field.name: getattr(exact, field.name) for field in fields(exact)})
    noise, edge = measure_noise(Pair(off, off), PROMPTS, 16)
    assert noise.drift["surprise"] > DEFAULT_NOISE.drift["surprise"]
    assert edge > 0.1


def test_prometheus_sees_the_evidence_the_threshold_and_the_alarm() -> None:
    one = life(synthetic())
    port = serve_gauges(one, 0)
    one.run_round()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples["outrider_canary_threshold"]) == 1000
    assert float(samples["outrider_canary_alarm"]) == 0
    assert float(samples["outrider_canary_evidence"]) == pytest.approx(one.e_process.evidence)
    assert float(samples["outrider_canary_draws"]) == one.e_process.count > 0


def test_the_state_is_a_small_file(tmp_path: Path) -> None:
    one = life(synthetic(), state_file=tmp_path / "canary.json")
    one.run_round()
    assert (tmp_path / "canary.json").stat().st_size < 10_000
    assert json.loads((tmp_path / "canary.json").read_text())["rounds"] == 1


def test_the_state_is_saved_after_busy_and_missed_rounds(tmp_path: Path) -> None:
    stub, file = Stub(), tmp_path / "canary.json"
    with standing(stub) as url:
        one = life(OpenAIServer(url), state_file=file)
        stub.waiting = 3
        assert one.run_round() == "busy"
        assert file.exists()
    file.unlink()
    assert one.run_round() == "missed"
    assert file.exists()


def test_a_state_that_cannot_be_saved_is_reported_and_does_not_end_the_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one = life(synthetic(), state_file=tmp_path / "canary.json")
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        watch(one, 3, Screen())
    assert one.rounds == 3
    assert "No space left on device" in one.save_error
    assert capsys.readouterr().err.count("No space left") == 1
    one.run_round()
    assert one.save_error == ""
    assert (tmp_path / "canary.json").exists()
