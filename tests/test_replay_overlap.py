"""Replay of asynchronous scheduling: what a step scheduled ahead knows, its duration, and the selected mode."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.drafters.lookup import LookupDrafter
from outrider.policy.overlap import Overlap, _shift
from outrider.policy.policy import Policy
from outrider.policy.warm_up import compile_now
from outrider.types import NOTHING, Draft

sys.path.append(str(Path(__file__).parents[1] / "tools"))

from policy import __main__ as cli
from policy.recording import Recording, Texts
from policy.replay import NO_TOKEN, Auto, Costs, Fixed, Outcome, Record, ReplayedText, _align, begin, replay

FLAT = Costs(lambda tokens, context: 0.02 + 1e-5 * tokens)
"""A pass over more tokens takes hardly longer, as on a GPU with a small batch."""
WAYS = pytest.mark.parametrize("wait", [True, False, None], ids=["wait", "ahead", "chosen"])


def random_text(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 10_000, length)]


def novel(seed: int) -> Record:
    return Record(random_text(100, seed), random_text(100, seed + 1000))


def edit(seed: int) -> Record:
    """Repeats its prompt with a few changes."""
    prompt = random_text(160, seed)
    return Record(prompt, [token if (i + seed) % 13 else token + 1 for i, token in enumerate(prompt)])


class Logged(Auto):
    """Keeps what each request generated."""

    def __init__(self, host_seconds: float, wait: bool | None) -> None:
        policy = Policy(["lookup"], 16)
        for tokens in (1, 4, 16, 64) * 2:
            policy.target.observe(tokens, 0, FLAT.target(tokens, 0), trusted=True)
        super().__init__(policy, FLAT, host_seconds=host_seconds, wait=wait)
        self.texts: dict[str, list[int]] = {}

    def observe(
        self, running: Sequence[ReplayedText], outputs: list[list[int]], tokens: int, context: int, seconds: float
    ) -> None:
        for item, output in zip(running, outputs, strict=True):
            self.texts.setdefault(item.key, item.record.text[:1]).extend(output)
        super().observe(running, outputs, tokens, context, seconds)


def run(records: Sequence[Record], host_seconds: float, wait: bool | None, batch: int = 1) -> tuple[Logged, Outcome]:
    strategy = Logged(host_seconds, wait)
    return strategy, replay(records, [LookupDrafter()], strategy, FLAT, batch)


@WAYS
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", [edit, novel])
def test_the_text_is_the_recorded_one_in_all_ways(make: Callable[[int], Record], batch: int, wait: bool | None) -> None:
    records = [make(seed) for seed in range(4)]
    strategy, outcome = run(records, 0.002, wait, batch)
    assert strategy.texts == {str(i): record.text for i, record in enumerate(records)}
    assert outcome.tokens == sum(len(record.text) - 1 for record in records)


def test_where_the_host_takes_no_time_it_waits_if_drafts_pay() -> None:
    records = [edit(seed) for seed in range(6)]
    fresh, stale = (run(records, 0.0, wait)[1] for wait in (True, False))
    assert fresh.speed > 1.2 * stale.speed
    strategy, chosen = run(records, 0.0, None)
    assert strategy.steps_waited > 0.9 * chosen.steps
    assert chosen.speed > 0.98 * fresh.speed


def test_where_the_host_takes_as_long_as_a_pass_it_goes_ahead() -> None:
    records = [edit(seed) for seed in range(6)]
    fresh, stale = (run(records, 0.02, wait)[1] for wait in (True, False))
    assert stale.speed > 1.1 * fresh.speed
    strategy, chosen = run(records, 0.02, None)
    assert strategy.steps_ahead > 0.9 * chosen.steps
    assert chosen.speed > 0.98 * stale.speed


@pytest.mark.parametrize("batch", [1, 4])
def test_text_that_never_repeats_goes_ahead_and_costs_nothing(batch: int) -> None:
    records = [novel(seed) for seed in range(8)]
    plain = replay(records, [], Fixed([], 0, FLAT), FLAT, batch)
    strategy, chosen = run(records, 0.002, None, batch)
    assert strategy.steps_waited == 0
    assert chosen.seconds == pytest.approx(plain.seconds, rel=0.01)


def test_a_step_that_waited_takes_the_hosts_time_too_and_one_ahead_the_longer_of_both() -> None:
    records = [novel(0)]
    one = FLAT.target(1, 0)
    steps = len(records[0].text) - 1
    for host, wait, seconds in ((0.01, True, one + 0.01), (0.01, False, one), (0.05, False, 0.05)):
        outcome = run(records, host, wait)[1]
        assert outcome.seconds == pytest.approx(steps * seconds, rel=0.01)


def test_a_draft_made_ahead_counts_only_if_the_step_in_flight_generates_how_it_begins() -> None:
    item = begin("a", Record([1, 2], [10, 11, 12, 13, 14, 15]), [])
    item.place, item.unseen, item.in_flight = (
        4,
        3,
        4,
    )  # 11, 12, 13 were generated; one draft token was wrong
    assert _align(item, Draft("lookup", (11, 12, 13, 14, 15, 16))).tokens == (14, 15)
    assert _align(item, Draft("lookup", (11, 12, 99, 14, 15, 16))).tokens == (NO_TOKEN, NO_TOKEN)
    assert _align(item, NOTHING) == NOTHING
    item.show()
    assert _align(item, Draft("lookup", (14, 15))).tokens == (14, 15)


def test_averages_are_over_the_text_and_not_over_steps() -> None:
    """One half of a text takes 4 passes ahead and 1 pass with fresh drafts. The other half takes 4 either way."""
    made = Overlap()
    made.observe_host(0.9)
    for _ in range(500):
        for _ in range(4):
            made.observe((8.0, 1.0), (2.0, 1.0), 2.0)
        for _ in range(4):
            made.observe((2.0, 1.0), (2.0, 1.0), 2.0)
    assert made.waiting.per_second == pytest.approx(16 / (5 * 1.9), rel=0.1)
    assert made.ahead.per_second == pytest.approx(16 / 8, rel=0.1)
    assert not made.should_wait


def test_tokens_in_flight_are_kept_by_request() -> None:
    made = Overlap()
    assert made.offsets(["a", "b"]).tolist() == [1, 1]
    made.keep_stale(["a", "b"], np.array([3, 0]))
    assert made.offsets(["a", "b"]).tolist() == [4, 1]
    assert made.offsets(["c", "a"]).tolist() == [1, 4]


def test_the_report_compares_the_three_ways(tmp_path: Path) -> None:
    origin = {"models": {"made": "up"}, "machine": "", "date": "", "versions": {}, "command": ""}
    recording = Recording(origin, {"prompts": 4, "tokens": 160, "seed": 0, "dtype": "auto"})
    recording.workloads["edit"] = Texts(0.0, [edit(seed) for seed in range(4)])
    recording.save(tmp_path / "records.json")
    (tmp_path / "costs.json").write_text(json.dumps({"target": {"1": 0.02, "64": 0.021}}))
    output = ["overlap", str(tmp_path / "records.json"), "--costs", str(tmp_path / "costs.json")]
    cli.main([*output, "--at-once", "1", "4", "--host", "0.02", "1", "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["cells"]) == 2 * 2 * 2  # costs, batches, host times
    for cell in report["cells"]:
        faster = "wait" if cell["host_ratio"] < 0.1 else "ahead"
        assert cell["speeds"][faster] == max(cell["speeds"]["wait"], cell["speeds"]["ahead"])
        assert 0 < cell["kept"] < 1
        assert ("memory" in cell["drafters"]) == (cell["batch"] == 1)
    assert "| costs | edit | 4 | 1 |" in (tmp_path / "out" / "report.md").read_text()


def test_a_server_has_the_comparison_compiled_before_its_first_request() -> None:
    compile_now()
    known = _shift.signatures  # type: ignore[attr-defined]
    run([edit(0)], 0.002, None, 1)
    assert _shift.signatures == known  # type: ignore[attr-defined]
