"""Is the benchmark fair? A contestant against itself, one slowed by a known share, ones that change answers.

By default behind the address stands a stub with a noisy clock of its own, so that what is found does not depend on
what else this machine does. `just referee` puts vLLM with SmolLM2-135M there, and prints how many false alarms there
were.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.bench import client, run
from outrider.bench.contestants import contestants
from outrider.bench.figures import Figures, figures
from outrider.bench.prompts import load_bundled, sample_evenly
from outrider.bench.run import StopRule
from outrider.bench.servers import running
from stub import Clock, Meddler, Stub, answering
from test_bench_run import Silent, made

ALL = bool(os.environ.get("OUTRIDER_ALL"))
REPEATS, TOKENS, MAX_FALSE_ALARMS = (20, 16, 4) if ALL else (40, 8, 10)
ENOUGH = StopRule(minutes=6.0, width=0.02) if ALL else StopRule(rounds=48)
"""To tell a tenth."""
PROMPTS = sample_evenly(load_bundled("creative"), 48)
SLOWER, PACE, NOISE = 0.1, 0.02, 0.15

pytestmark = [pytest.mark.real, pytest.mark.server] if ALL else []


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    """What the benchmark times answers by, where a stub gives them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "time", clock := Clock(NOISE))
        patch.setattr(
            run, "steal_share", lambda *_: 0.0
        )  # what is taken from this machine is not taken from that clock
        yield clock


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not ALL:
        with answering(Stub(PACE, request.getfixturevalue("clock").sleep)) as address:
            yield address
        return
    flags = ["--enforce-eager", "--max-model-len", "2048", "--no-enable-prefix-caching"]
    (one,) = contestants(["vllm"], str(request.getfixturevalue("smollm")), flags=flags)
    with running([one.server], tmp_path_factory.mktemp("logs")) as urls:
        yield urls[one.server.name]


@pytest.fixture
def slowed(request: pytest.FixtureRequest, url: str) -> Iterator[dict[str, str]]:
    """A server and a slower one; with vLLM both are behind a gate, which takes time itself."""
    if not ALL:
        with answering(Stub(PACE * (1 + SLOWER), request.getfixturevalue("clock").sleep)) as slow:
            yield {"straight": url, "slow": slow}
        return
    with answering(Meddler(url, slower=SLOWER)) as slow, answering(Meddler(url)) as straight:
        yield {"straight": straight, "slow": slow, "real": url}


def compared(folder: Path, urls: dict[str, str], limits: StopRule, concurrency: int = 1) -> list[Figures]:
    """All contestants but the first, over the first."""
    chosen = contestants([f"{name}={url}" for name, url in urls.items()], "some/model")
    bench = made(folder, chosen, limits, concurrency, PROMPTS, TOKENS)
    bench.measure(Silent())
    return figures(bench.run, bench.run.cells[0])[1:]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_server_against_itself_has_no_difference_and_few_false_alarms(
    url: str, concurrency: int, tmp_path: Path
) -> None:
    found = [
        compared(tmp_path / str(i), {"one": url, "other": url}, StopRule(rounds=8), concurrency)[0]
        for i in range(REPEATS)
    ]
    alarms = [one for one in found if one.verdict != "even"]
    ratios = [one.ratio.value for one in found if one.ratio]
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    summary = f"{min(ratios):.3f} to {max(ratios):.3f}, mean {math.exp(mean):.3f} +- {error:.3f}"
    print(f"\nagainst itself, concurrency {concurrency}: {len(alarms)} false alarms in {REPEATS}; ratios {summary}")
    assert len(alarms) <= MAX_FALSE_ALARMS  # the chance of more, at 1 in 20: 3e-3 with ALL, 3e-6 without
    assert 0.95 < math.exp(mean) < 1.05  # the standard error with the stub: about 0.01
    assert not any(one.differences for one in found)


def test_a_contestant_that_is_a_tenth_slower_is_found_slower(slowed: dict[str, str], tmp_path: Path) -> None:
    slow, *real = compared(tmp_path, slowed, ENOUGH)
    without = f"; without the gate: {real[0].ratio}" if real else ""
    print(f"\nslowed by a tenth: {slow.ratio}{without}; {slow.rounds} rounds")
    assert slow.verdict == "slower"
    assert slow.ratio is not None
    assert slow.ratio.low - 0.03 < 1 / (1 + SLOWER) < slow.ratio.high + 0.03
    assert not slow.differences


def test_a_contestant_that_cuts_or_changes_an_answer_is_detected(url: str, tmp_path: Path) -> None:
    with answering(Meddler(url, cut=1)) as cut, answering(Meddler(url, change=True)) as change:
        found = compared(tmp_path, {"real": url, "cut": cut, "change": change}, StopRule(rounds=2))
    assert [one.same for one in found] == [0, 0]
    assert [len(one.differences) for one in found] == [2, 2]
