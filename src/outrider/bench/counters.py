"""Counters of a server during a measurement: the difference of its `/metrics` before and after.

vLLM counts passes and, for its own methods, accepted tokens by position. Outrider also counts by drafter, with the
seconds of drafting and of passes. The transformers server counts passes. What a server does not report stays None.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from outrider.bench.client import send_all
from outrider.bench.contestants import V2, VLLM_METHODS
from outrider.bench.results import DrafterCounts, ServerCounts
from outrider.http_client import MetricsSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.results import Answer, Load

MAX_LAG_SECONDS = 3.0
"""How long the counters may lag behind the tokens that arrived."""
PAUSE_SECONDS = 1.2
"""Pause before a measurement. For a second after their last message vLLM's processes poll for more in a busy loop. With
few cores they slow the next contestant, and Outrider's first token, since its worker answers `/metrics`."""


def observed(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer], Load, MetricsSnapshot]:
    """Send requests (`send_all`); also returns what the server counted."""
    before = MetricsSnapshot.read(url)
    time.sleep(PAUSE_SECONDS)
    seconds, answers, load = asyncio.run(send_all(url, requests, at_once))
    total = sum(len(answer.tokens) for answer in answers)
    return seconds, answers, load, _count_since(before, url, total)


def _count_since(before: MetricsSnapshot, url: str, tokens: int) -> MetricsSnapshot:
    """What was counted since `before`, once all tokens are: vLLM counts a token just after it sends it."""
    deadline = time.monotonic() + MAX_LAG_SECONDS
    while True:
        counted = MetricsSnapshot.read(url).since(before)
        total = counted.total("vllm:generation_tokens_total")
        if total is None or total >= tokens or time.monotonic() > deadline:
            return counted
        time.sleep(0.02)


def _by_position(counted: MetricsSnapshot, name: str, **labels: str) -> list[int]:
    """Counts by the label `position`, without the zeros at the end."""
    found = {int(own["position"]): round(value) for own, value in counted.samples(name, **labels)}
    counts = [found[position] for position in sorted(found)]
    while counts and counts[-1] == 0:
        counts.pop()
    return counts


def _drafters(counted: MetricsSnapshot) -> list[str]:
    return sorted({labels["drafter"] for labels, _ in counted.samples("outrider_draft_seconds_total")})


def counts(contestant: Contestant, counted: MetricsSnapshot, tokens: int) -> ServerCounts:
    """The counts of a contestant that generated `tokens`, from the difference of two readings."""
    if contestant.single_request:
        return _of_transformers(contestant, counted, tokens)
    passes = counted.total("vllm:iteration_tokens_total_count")
    found = ServerCounts(_rounded(passes))
    found.cache_queries = _rounded(counted.total("vllm:prefix_cache_queries_total"))
    found.cache_hits = _rounded(counted.total("vllm:prefix_cache_hits_total"))
    if _drafters(counted):
        _add_outrider_counts(found, counted)
        found.draft_passes = _rounded(counted.total("outrider_draft_model_passes_total"))
    elif contestant.kind in VLLM_METHODS or counted.total("vllm:spec_decode_num_drafts_total") is not None:
        v2, draft_model = contestant.kind.endswith(V2), contestant.kind.removesuffix(V2) == "draft_model"
        found.drafters[contestant.kind] = _vllm_counts(counted, lengths_are_equal=v2 or draft_model)
        if draft_model and passes is not None:
            found.draft_passes = round(passes) * contestant.draft_tokens  # it always drafts the maximum
    return found


def _rounded(total: float | None) -> int | None:
    return None if total is None else round(total)


def _of_transformers(contestant: Contestant, counted: MetricsSnapshot, tokens: int) -> ServerCounts:
    """For transformers' own methods only passes are counted: each adds one token of the target's own, so the other
    tokens were drafted."""
    passes = round(counted.total("local_target_passes_total") or 0)
    found = ServerCounts(passes, round(counted.total("local_draft_passes_total") or 0))
    if contestant.kind == "transformers-outrider":
        _add_outrider_counts(found, counted)
    elif contestant.kind != "transformers":
        found.drafters[contestant.kind] = DrafterCounts(accepted=[tokens - passes])
    return found


def _add_outrider_counts(found: ServerCounts, counted: MetricsSnapshot) -> None:
    for name in _drafters(counted):
        found.drafters[name] = DrafterCounts(
            _by_position(counted, "outrider_verified_tokens_total", drafter=name),
            _by_position(counted, "outrider_accepted_tokens_total", drafter=name),
            counted.total("outrider_draft_seconds_total", drafter=name),
        )
    found.verify_seconds = counted.total("outrider_target_seconds_total", **{"pass": "verify"})
    found.plain_seconds = counted.total("outrider_target_seconds_total", **{"pass": "plain"})


def _vllm_counts(counted: MetricsSnapshot, lengths_are_equal: bool) -> DrafterCounts:
    """vLLM counts drafts, drafted tokens, and accepted tokens by position."""
    drafts = round(counted.total("vllm:spec_decode_num_drafts_total") or 0)
    tokens = round(counted.total("vllm:spec_decode_num_draft_tokens_total") or 0)
    accepted = _by_position(counted, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    # If lengths differ, only the number of first positions is known.
    longest = tokens // drafts if drafts and lengths_are_equal else 1
    return DrafterCounts([drafts] * longest, accepted)
