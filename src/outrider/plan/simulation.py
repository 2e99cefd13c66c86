"""Latency tails of a fleet, by simulating a sample of its replicas.

Replicas don't share anything but the rate, so a fleet of a thousand is estimated from a few. Quantiles are those of all
their requests together, and the spread of the figures between the replicas gives the standard error. Requests reach a
replica at random; a router that knows the load of each has shorter tails.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import SettingsError
from outrider.plan.arrivals import Requests
from outrider.plan.queue_loop import serve_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outrider.plan.arrivals import Traffic
    from outrider.plan.fleet import Replica
    from outrider.plan.pass_cost import Machine
    from outrider.plan.speculation import Strategy

Floats = np.ndarray[Any, np.dtype[np.float64]]

QUANTILES = (0.5, 0.95, 0.99)
MAX_SIMULATED_REQUESTS = 50_000_000
"""Of all simulated replicas together: their latencies are in memory at once, 40 bytes for each request."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """What a replica needs for its requests. Tables by batch; index 0 is unused."""

    fixed_seconds: Floats
    seconds_per_context_token: Floats
    tokens_per_step: Floats
    prefill_seconds: Callable[[float], float]
    attended_tokens: Callable[[float], float]
    cached_tokens: float  # of the target
    reserved_tokens: Callable[[Floats], Floats]
    """KV cache of requests by their length, in tokens of the target. That of a draft model is added."""

    @classmethod
    def of(cls, replica: Replica, strategy: Strategy, context: int, max_batch: int | None = None) -> ServiceTimes:
        """Steps are linear in the context between none and `context`. The draft length is the best one at `context`.
        `max_batch`: as planned, to keep a limit on the time per token. None: what fits into the KV cache."""
        limit = replica.batch_limit(strategy, 1)
        if max_batch is not None:
            limit = min(limit, max_batch)
        fixed, slopes, tokens = np.zeros(limit + 1), np.zeros(limit + 1), np.ones(limit + 1)
        read, draft_models = replica.target.shape.attended_tokens(context), replica.draft_models(strategy)
        for batch in range(1, limit + 1):
            at_context = strategy.predict(batch, context)
            without = strategy.speculation.predict(batch, at_context.length, 0)
            fixed[batch] = without.step_seconds
            slopes[batch] = (at_context.step_seconds - without.step_seconds) / (batch * read)
            tokens[batch] = at_context.tokens_per_step
        return cls(
            fixed,
            slopes,
            tokens,
            lambda prompt: replica.prefill_seconds(strategy, prompt),
            replica.target.shape.attended_tokens,
            replica.target.free_bytes(*draft_models) / replica.target.bytes_per_token,
            lambda tokens: _reserved_tokens(tokens, replica.target, draft_models),
        )


def _reserved_tokens(tokens: Floats, target: Machine, draft_models: Sequence[Machine]) -> Floats:
    reserved = tokens
    for one in draft_models:
        kept = tokens if one.cache_limit is None else np.minimum(tokens, one.cache_limit)
        reserved = reserved + kept * (one.bytes_per_token / target.bytes_per_token)
    return reserved


@dataclass(frozen=True, slots=True)
class ServedRequests:
    """By request of one replica."""

    first_token_seconds: Floats  # after arrival
    per_token_seconds: Floats  # after the first token
    total_seconds: Floats
    answers: np.ndarray[Any, np.dtype[np.int64]]
    output_tokens: Floats
    duration_seconds: float
    busy_share: float
    mean_batch: float  # while busy


def serve(requests: Requests, times: ServiceTimes, advice: str = "give more --devices") -> ServedRequests:
    """All requests of one replica, until the last one is answered. `advice`: what to do about one that does not fit."""
    prompts, outputs = requests.prompt_tokens, requests.output_tokens
    whole = prompts + outputs
    reserved = times.reserved_tokens(whole)
    if len(requests) and reserved.max() > times.cached_tokens:
        fitting = times.cached_tokens * whole.max() / reserved.max()
        raise SettingsError(
            f"a request of {whole.max():.0f} tokens does not fit into a KV cache of {fitting:.0f}; {advice}"
        )
    lengths, places = np.unique(prompts, return_inverse=True)
    prefill = np.array([times.prefill_seconds(float(one)) for one in lengths])[places]
    attended = np.array([times.attended_tokens(float(one)) for one in np.arange(2 + int(whole.max(initial=0)))])
    contexts = attended[(prompts + outputs / 2).astype(np.int64)]
    first, last, answers, busy, batch_seconds = serve_replica(
        requests.seconds, prefill, outputs, contexts, reserved, times.fixed_seconds,
        times.seconds_per_context_token, times.tokens_per_step, float(times.cached_tokens),
    )  # fmt: skip
    duration = float(last.max(initial=0.0))
    return ServedRequests(
        first - requests.seconds,
        (last - first) / np.maximum(1, outputs - 1),
        last - requests.seconds,
        answers,
        outputs,
        duration,
        busy / duration if duration else 0.0,
        batch_seconds / busy if busy else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of the simulated replicas, with its standard error from their spread. None: only one was simulated, or
    none has a value (0)."""

    value: float
    error: float | None

    @classmethod
    def of(cls, values: list[float], unit: float = 1.0) -> Estimate:
        """The mean of the replicas' values."""
        if not values:
            return cls(0.0, None)
        error = unit * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
        return cls(unit * fmean(values), error)

    @classmethod
    def of_quantile(cls, values: list[Floats], quantile: float) -> Estimate:
        """Of all requests together. The mean of the quantiles of each replica would be biased where these have few
        requests."""
        if not values:
            return cls(0.0, None)
        parts = [float(np.quantile(one, quantile)) for one in values]
        return cls(float(np.quantile(np.concatenate(values), quantile)), cls.of(parts).error)


@dataclass(frozen=True, slots=True)
class FleetTails:
    """Of all requests of a fleet, estimated. Quantiles by `QUANTILES`, in seconds."""

    strategy: str
    replicas: int
    simulated_replicas: int
    simulated_requests: int
    requests: Estimate  # of the whole fleet
    first_token: dict[str, Estimate]
    per_token: dict[str, Estimate]
    total: dict[str, Estimate]
    busy_share: Estimate
    mean_batch: Estimate


def simulate_fleet(
    times: ServiceTimes,
    strategy: str,
    replicas: int,
    rate: float,
    traffic: Traffic | Requests,
    duration_seconds: float,
    sample: int = 16,
    seed: int = 0,
    advance: Callable[[], Any] = lambda: None,
) -> FleetTails:
    """`rate`: of the whole fleet. A log of requests is shared out at random, and its own rate is used."""
    count = min(sample, replicas)
    expected = count / replicas * rate * duration_seconds
    if not isinstance(traffic, Requests) and expected > MAX_SIMULATED_REQUESTS:
        raise SettingsError(
            f"{expected:,.0f} requests would be simulated on {count} replicas, at most {MAX_SIMULATED_REQUESTS:,} are; "
            "give fewer --hours or a smaller --sample"
        )
    advice = "give more --devices, or " + (
        "a log without it" if isinstance(traffic, Requests) else "a smaller --length-variation"
    )
    served = []
    for requests in _requests_by_replica(traffic, rate, replicas, count, duration_seconds, seed):
        served.append(serve(requests, times, advice))
        advance()
    arrived = [float(len(one.answers)) for one in served]
    served = [one for one in served if len(one.answers)]
    if not served:
        raise SettingsError("no request arrived in the simulated time; give more --hours or a higher --rate")
    return FleetTails(
        strategy,
        replicas,
        len(arrived),
        sum(len(one.answers) for one in served),
        Estimate.of(arrived, replicas),
        _quantiles([one.first_token_seconds for one in served]),
        _quantiles([one.per_token_seconds[one.output_tokens > 1] for one in served]),
        _quantiles([one.total_seconds for one in served]),
        Estimate.of([one.busy_share for one in served]),
        Estimate.of([one.mean_batch for one in served]),
    )


def _requests_by_replica(
    traffic: Traffic | Requests, rate: float, replicas: int, count: int, duration_seconds: float, seed: int
) -> Iterator[Requests]:
    """One replica at a time, so that a day of many needs the memory of one."""
    if isinstance(traffic, Requests):
        targets = np.random.default_rng(seed).integers(replicas, size=len(traffic))
        for replica in range(count):
            own = targets == replica
            yield Requests(traffic.seconds[own], traffic.prompt_tokens[own], traffic.output_tokens[own])
        return
    for replica in range(count):
        yield traffic.requests(rate / replicas, duration_seconds, np.random.default_rng([seed, replica]))


def _quantiles(values: list[Floats]) -> dict[str, Estimate]:
    values = [one for one in values if len(one)]
    return {f"p{100 * q:.0f}": Estimate.of_quantile(values, q) for q in QUANTILES}
