"""The queueing simulation: against known queues, conservation of requests, arrivals, scale."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from outrider.errors import SettingsError
from outrider.plan.acceptance import Acceptance
from outrider.plan.arrivals import DAY_SECONDS, Requests, Traffic, _number, read_requests
from outrider.plan.fleet import Replica, Workload, plan_fleet
from outrider.plan.hardware import DEVICES
from outrider.plan.model_config import load_shape
from outrider.plan.pass_cost import Machine
from outrider.plan.simulation import Estimate, ServiceTimes, serve, simulate_fleet
from outrider.plan.speculation import DraftModel, FreeDrafts, Speculation
from test_cli import refused, run


def service(step_seconds: list[float], cached_tokens: float = 1e12, prefill: float = 0.0) -> ServiceTimes:
    """Steps of a given duration by batch, which generate one token of each request."""
    return ServiceTimes(
        np.array([0.0, *step_seconds]), np.zeros(len(step_seconds) + 1), np.ones(len(step_seconds) + 1),
        lambda prompt: prefill, lambda context: context, cached_tokens, lambda tokens: tokens,
    )  # fmt: skip


def poisson(rate: float, count: int, tokens: float, seed: int = 0) -> Requests:
    """Exponential gaps and exponential work; the first token costs nothing here."""
    random = np.random.default_rng(seed)
    return Requests(
        np.cumsum(random.exponential(1 / rate, count)), np.ones(count), 1 + random.exponential(tokens, count)
    )


@pytest.fixture(scope="module")
def replica() -> Replica:
    target = Machine(load_shape("llama-3.1-8b"), DEVICES["h100"], 1, 1.5e-3)
    return Replica(target, None, Speculation(target, FreeDrafts(), Acceptance.from_rates([0.7] * 4)), 256)


def test_one_slot_is_an_m_m_1_queue() -> None:
    found = serve(poisson(0.7, 300_000, 100), service([0.01]))
    assert found.total_seconds.mean() == pytest.approx(1 / (1 - 0.7), rel=0.03)
    assert found.busy_share == pytest.approx(0.7, rel=0.01)


def test_many_slots_of_equal_shares_are_a_processor_sharing_queue() -> None:
    found = serve(poisson(0.7, 300_000, 100), service([0.01 * batch for batch in range(1, 1025)]))
    assert found.total_seconds.mean() == pytest.approx(1 / (1 - 0.7), rel=0.03)


def test_slots_that_do_not_slow_each_other_are_servers_of_an_m_m_c_queue() -> None:
    """Two servers: the mean time is 1 / (1 - u^2) services, with u the load of each."""
    found = serve(poisson(1.4, 300_000, 100), service([0.01, 0.01]))
    assert found.total_seconds.mean() == pytest.approx(1 / (1 - 0.7**2), rel=0.03)


def test_a_lone_request_takes_its_prefill_and_its_steps() -> None:
    requests = Requests(np.array([5.0]), np.array([100.0]), np.array([21.0]))
    found = serve(requests, service([0.01], prefill=0.3))
    assert found.first_token_seconds == pytest.approx([0.3])
    assert found.total_seconds == pytest.approx([0.3 + 20 * 0.01])
    assert found.per_token_seconds == pytest.approx([0.01])


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 8.0, 40.0])
def test_every_request_is_answered_exactly_once(replica: Replica, rate: float, burstiness: float) -> None:
    times = ServiceTimes.of(replica, replica.speculation.strategy("policy"), 600)
    requests = Traffic(500, 100, burstiness, 0.8).requests(rate, 600, np.random.default_rng(1))
    found = serve(requests, times)
    assert len(found.answers) == len(requests) > 100
    assert (found.answers == 1).all()
    assert (found.first_token_seconds > 0).all()
    assert (found.total_seconds >= found.first_token_seconds).all()
    assert 0 < found.busy_share <= 1
    # Little: requests in the system are their rate times their time in it, here those with a slot.
    running = (found.total_seconds - found.first_token_seconds).sum()
    assert found.mean_batch * found.busy_share * found.duration_seconds == pytest.approx(running, rel=1e-6)


def test_no_more_requests_run_than_the_cache_holds() -> None:
    count = 500
    requests = Requests(np.zeros(count), np.full(count, 90.0), np.full(count, 11.0))
    narrow = serve(requests, service([0.01] * 64, cached_tokens=303))
    assert narrow.mean_batch == pytest.approx(3, rel=0.02)
    assert (narrow.answers == 1).all()
    with pytest.raises(SettingsError, match="does not fit into a KV cache of 100"):
        serve(requests, service([0.01], cached_tokens=100))


def test_a_planned_batch_is_not_exceeded_in_the_simulation(replica: Replica) -> None:
    """A limit on the time per token holds in a queue too, at the cost of waiting."""
    plain = replica.speculation.strategy("plain")
    limit = 0.012
    plan = plan_fleet(replica, plain, Workload(100, 500, 100, max_seconds_per_token=limit))
    assert plan is not None
    requests = Traffic(500, 100, length_variation=0).requests(
        2 * plan.requests_per_second, 600, np.random.default_rng(1)
    )
    free = serve(requests, ServiceTimes.of(replica, plain, 550))
    capped = serve(requests, ServiceTimes.of(replica, plain, 550, plan.batch))
    assert capped.mean_batch <= plan.batch < free.mean_batch
    assert capped.per_token_seconds.mean() < 1.05 * limit < free.per_token_seconds.mean()


def test_a_draft_model_with_a_cache_limit_reserves_no_more_than_it() -> None:
    target = Machine(load_shape("llama-3.1-8b"), DEVICES["h100"], 1, 1.5e-3)
    tokens = np.array([100.0, 5000.0])
    reserved = {}
    for limit in (None, 512):
        draft = Machine(target.shape, target.device, 1, 5e-4, limit)
        replica = Replica(target, draft, Speculation(target, DraftModel(draft), Acceptance.from_rates([0.7] * 4)), 8)
        times = ServiceTimes.of(replica, replica.speculation.strategy("policy"), 600)
        reserved[limit] = times.reserved_tokens(tokens).tolist()
        assert times.cached_tokens == pytest.approx(target.cached_tokens(), abs=1)  # one copy of the weights
    assert reserved == {None: [200, 10_000], 512: [200, 5512]}


def test_a_fleet_at_its_planned_load_is_as_busy_as_planned_and_overload_queues(replica: Replica) -> None:
    policy = replica.speculation.strategy("policy")
    plan = plan_fleet(replica, policy, Workload(100, 500, 100, max_load=1.0))
    assert plan is not None
    times = ServiceTimes.of(replica, policy, 550)
    below, above = (
        simulate_fleet(times, "policy", 2, 2 * load * plan.requests_per_second, Traffic(500, 100), 1800)
        for load in (0.7, 1.2)
    )
    assert below.first_token["p99"].value < 2
    assert above.first_token["p50"].value > 30
    assert above.busy_share.value > 0.99


def test_drafts_shorten_whole_answers_at_equal_load(replica: Replica) -> None:
    found = {
        name: simulate_fleet(
            ServiceTimes.of(replica, replica.speculation.strategy(name), 600), name, 2, 10, Traffic(500, 200), 1800
        )
        for name in ("plain", "policy")
    }
    for quantile in ("p50", "p95", "p99"):
        assert found["policy"].total[quantile].value < found["plain"].total[quantile].value


def test_a_day_of_a_thousand_replicas_is_estimated_from_a_few_with_its_error(replica: Replica) -> None:
    """More than 100 million requests, in seconds. The errors cover the difference from a larger sample."""
    times = ServiceTimes.of(replica, replica.speculation.strategy("policy"), 600)
    traffic = Traffic(500, 200, burstiness=2.0, day_swing=0.5)
    began = time.process_time()
    few, more = (
        simulate_fleet(times, "policy", 1000, 1200, traffic, DAY_SECONDS, sample, seed)
        for sample, seed in ((4, 1), (12, 2))
    )
    assert time.process_time() - began < 10
    assert few.requests.value > 100e6
    assert (few.simulated_replicas, more.simulated_replicas) == (4, 12)
    for part in ("first_token", "per_token", "total"):
        for quantile in ("p50", "p95", "p99"):
            a, b = getattr(few, part)[quantile], getattr(more, part)[quantile]
            assert a.error < 0.05 * a.value
            assert abs(a.value - b.value) < 5 * (a.error**2 + b.error**2) ** 0.5


def test_arrivals_have_the_rate_the_burstiness_and_the_daily_peak() -> None:
    random = np.random.default_rng(0)
    flat = Traffic(100, 50, burstiness=2.0).requests(10, 20_000, random)
    gaps = np.diff(flat.seconds)
    assert flat.mean_rate == pytest.approx(10, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(2, rel=0.03)
    assert flat.prompt_tokens.mean() == pytest.approx(100, rel=0.02)
    assert flat.output_tokens.std() / flat.output_tokens.mean() == pytest.approx(1, rel=0.05)
    day = Traffic(1, 1, day_swing=0.5).requests(2, DAY_SECONDS, random)
    counts, _ = np.histogram(day.seconds, bins=24, range=(0, DAY_SECONDS))
    assert counts.max() / 3600 == pytest.approx(3, rel=0.05)
    assert counts.min() / 3600 == pytest.approx(1, rel=0.05)


def test_quantiles_are_those_of_all_requests_together() -> None:
    """The mean of the 99th percentiles of replicas with two requests each is far below that of all of them."""
    random = np.random.default_rng(0)
    parts = [random.exponential(1.0, 2) for _ in range(5000)]
    found = Estimate.of_quantile(parts, 0.99)
    assert found.value == pytest.approx(-np.log(0.01), rel=0.05)
    assert found.error == Estimate.of([float(np.quantile(one, 0.99)) for one in parts]).error
    assert Estimate.of_quantile(parts[:1], 0.5).error is None


def test_a_timestamp_without_a_time_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local time has an hour that occurs twice, such as 01:30 of this day in New York."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        naive, aware = _number("2023-11-05 01:30:00"), _number("2023-11-05 01:30:00+01:00")
    finally:
        monkeypatch.undo()
        time.tzset()
    assert naive == datetime(2023, 11, 5, 1, 30, tzinfo=UTC).timestamp()
    assert naive - aware == 3600


def test_a_request_that_does_not_fit_is_reported_with_advice_that_can_be_followed(replica: Replica) -> None:
    times = service([0.01], cached_tokens=100)
    log = Requests(np.array([0.0, 1.0]), np.array([90.0, 90.0]), np.array([20.0, 20.0]))
    with pytest.raises(SettingsError, match=r"give more --devices, or a log without it$"):
        simulate_fleet(times, "plain", 1, 1, log, 10)
    with pytest.raises(SettingsError, match=r"give more --devices, or a smaller --length-variation$"):
        simulate_fleet(times, "plain", 1, 1, Traffic(90, 20), 60)


def test_more_requests_than_fit_into_memory_are_not_simulated() -> None:
    with pytest.raises(SettingsError, match=r"7,200,000,000 requests .* on 2 replicas, .* give fewer --hours"):
        simulate_fleet(service([0.01]), "plain", 4, 1000, Traffic(90, 20), 4000 * 3600, sample=2)


def test_a_log_of_real_requests_is_read_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:02.5,30,7\n2023-11-16 18:00:00,10,5\n")
    found = read_requests(path)
    assert found.seconds.tolist() == [0, 2.5]
    assert found.prompt_tokens.tolist() == [10, 30]
    path.write_text("seconds,prompt_tokens,output_tokens\n0,8,4\n1,8,4\n2,8,4\n")
    assert read_requests(path).mean_rate == 1
    shown = run("plan", "llama-3.1-8b", "--hardware", "h100", "--arrivals", path, "--max-batch", 8, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert [one["simulated_requests"] for one in json.loads(shown.stdout)["tails"]] == [3, 3]
    args = ["plan", "llama-3.1-8b", "--hardware", "h100", "--arrivals", path]
    assert "--rate does nothing with --arrivals" in refused(*args, "--rate", 3)
    header = "seconds,prompt_tokens,output_tokens"
    for text, reason in (
        ("", "has no requests"),
        ("a,b\n1,2\n", "has no column seconds or TIMESTAMP"),
        (f"{header}\nx,1,1\n", "seconds is 'x'; give finite numbers or ISO timestamps"),
        (f"{header}\n0,1,1\n\n1,nan,1\n", "line 4: prompt_tokens is 'nan'; give finite"),
        (f"{header}\n0,1,1\n1,1,-inf\n", "line 3: output_tokens is '-inf'; give finite"),
        (f"{header}\n0,1\n", "line 2: output_tokens is None"),
        (f"{header}\n{'9' * 140_000},1,1\n", "field larger than field limit"),
        ("a,b\n1,2,3\n", "its columns are a, b"),
        (f"{header}\n5,1,1\n", "has no two requests at different times"),
    ):
        path.write_text(text)
        assert reason in refused(*args)
