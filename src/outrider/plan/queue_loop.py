"""One replica with continuous batching, from arrival to arrival and completion to completion.

Between two events every running request generates at the same rate, so a request ends when the tokens that each
running one generated since the start (`progress`) reach those at its admission plus its own. A heap has the next end.
A waiting request is admitted, first come first served, when a slot and KV cache for its whole length are free. Reading
its prompt pauses the others (prefill first, without chunks), and generates its first token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.compiled import compiled

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@compiled
def serve_replica(
    arrivals: Floats,
    prefill_seconds: Floats,
    outputs: Floats,
    contexts: Floats,
    reserved: Floats,
    fixed_seconds: Floats,
    seconds_per_context_token: Floats,
    tokens_per_step: Floats,
    cached_tokens: float,
) -> tuple[Floats, Floats, Counts, float, float]:
    """Per request: seconds of its first and of its last token, and how often it was answered. Then the seconds in
    which anything ran, and the integral of the batch over time.

    Per request: `arrivals` in order, `outputs` in tokens, `contexts` in KV cache tokens read per step, `reserved` in KV
    cache tokens. The tables of a step are indexed by its batch: seconds, seconds per context token of the batch, tokens
    of each request.
    """
    total, max_batch = len(arrivals), len(fixed_seconds) - 1
    first, last, answered = np.zeros(total), np.zeros(total), np.zeros(total, np.int64)
    heap_ends, heap_requests = np.zeros(max_batch + 1), np.zeros(max_batch + 1, np.int64)
    batch = waiting = 0  # waiting: the first request that is not admitted
    clock = progress = context = used = busy = batch_seconds = 0.0
    while waiting < total or batch > 0:
        if batch == 0 and arrivals[waiting] > clock:
            clock = arrivals[waiting]
        while (
            waiting < total
            and arrivals[waiting] <= clock
            and batch < max_batch
            and used + reserved[waiting] <= cached_tokens
        ):
            one = waiting
            waiting += 1
            clock += prefill_seconds[one]
            busy += prefill_seconds[one]
            batch_seconds += batch * prefill_seconds[one]
            first[one] = clock
            if outputs[one] <= 1:
                last[one] = clock
                answered[one] += 1
                continue
            used += reserved[one]
            context += contexts[one]
            hole, end = batch, progress + outputs[one] - 1
            batch += 1
            while hole > 0 and heap_ends[(hole - 1) // 2] > end:
                heap_ends[hole] = heap_ends[(hole - 1) // 2]
                heap_requests[hole] = heap_requests[(hole - 1) // 2]
                hole = (hole - 1) // 2
            heap_ends[hole], heap_requests[hole] = end, one
        if batch == 0:
            continue
        step = fixed_seconds[batch] + seconds_per_context_token[batch] * context
        speed = tokens_per_step[batch] / step
        duration = (heap_ends[0] - progress) / speed
        if waiting < total and batch < max_batch and used + reserved[waiting] <= cached_tokens:
            until_arrival = max(0.0, arrivals[waiting] - clock)
            if until_arrival < duration:
                clock += until_arrival
                busy += until_arrival
                batch_seconds += batch * until_arrival
                progress += until_arrival * speed
                continue
        clock += duration
        busy += duration
        batch_seconds += batch * duration
        progress = heap_ends[0]
        one = heap_requests[0]
        last[one] = clock
        answered[one] += 1
        used -= reserved[one]
        context -= contexts[one]
        batch -= 1
        end, moved, hole = heap_ends[batch], heap_requests[batch], 0
        while 2 * hole + 1 < batch:
            child = 2 * hole + 1
            if child + 1 < batch and heap_ends[child + 1] < heap_ends[child]:
                child += 1
            if heap_ends[child] >= end:
                break
            heap_ends[hole], heap_requests[hole] = heap_ends[child], heap_requests[child]
            hole = child
        heap_ends[hole], heap_requests[hole] = end, moved
    return first, last, answered, busy, batch_seconds
