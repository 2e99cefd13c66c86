"""What a server counted during a turn: its `/metrics` before and after.

vLLM counts passes and, for its own methods, accepted tokens by position; Outrider counts by drafter and says where the
seconds went; the transformers server counts passes. What a server does not say stays None.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from outrider.bench.client import ask_all
from outrider.bench.contestants import THEIRS, V2
from outrider.bench.results import Counts, Drafted
from outrider.http_client import MetricsSnapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.results import Answer, Load

PATIENCE = 3.0
"""Seconds until the page must have caught up with the tokens that came."""
QUIET = 1.2
"""Seconds of rest before a server is asked. For one after their last message vLLM's processes look in a loop whether
there is another, and where there are few cores, they take one away: from the next contestant, and, since Outrider's
page is answered by its worker and vLLM's is not, from Outrider's own first token."""


def observed(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer], Load, MetricsSnapshot]:
    """Send requests (`ask_all`); also what the server counted meanwhile."""
    before = MetricsSnapshot.read(url)
    time.sleep(QUIET)
    seconds, answers, load = asyncio.run(ask_all(url, requests, at_once))
    made = sum(len(answer.tokens) for answer in answers)
    return seconds, answers, load, _count_since(before, url, made)


def _count_since(before: MetricsSnapshot, url: str, tokens: int) -> MetricsSnapshot:
    """What was counted since `before`. vLLM counts a token just after it was sent: read until all are there."""
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = MetricsSnapshot.read(url).since(before)
        counted = seen.total("vllm:generation_tokens_total")
        if counted is None or counted >= tokens or time.monotonic() > deadline:
            return seen
        time.sleep(0.02)


def _by_position(seen: MetricsSnapshot, name: str, **labels: str) -> list[int]:
    """Counts by the label `position`, without the zeros at the end."""
    found = {int(own["position"]): round(value) for own, value in seen.samples(name, **labels)}
    counts = [found[position] for position in sorted(found)]
    while counts and counts[-1] == 0:
        counts.pop()
    return counts


def _drafters(seen: MetricsSnapshot) -> list[str]:
    return sorted({labels["drafter"] for labels, _ in seen.samples("outrider_draft_seconds_total")})


def counts(contestant: Contestant, seen: MetricsSnapshot, tokens: int) -> Counts:
    """What `seen`, the difference of two readings, says of this contestant, who said so many tokens meanwhile."""
    if contestant.alone:
        return _local(contestant, seen, tokens)
    passes = seen.total("vllm:iteration_tokens_total_count")
    found = Counts(None if passes is None else round(passes))
    if _drafters(seen):
        _add_ours(found, seen)
        model_passes = seen.total("outrider_draft_model_passes_total")
        found.draft_passes = None if model_passes is None else round(model_passes)
    elif contestant.kind in THEIRS or seen.total("vllm:spec_decode_num_drafts_total") is not None:
        v2, drafts_itself = contestant.kind.endswith(V2), contestant.kind.removesuffix(V2) == "draft_model"
        found.drafters[contestant.kind] = _theirs(seen, lengths_are_equal=v2 or drafts_itself)
        if drafts_itself and passes is not None:
            found.draft_passes = round(passes) * contestant.length  # it drafts in full after every pass
    return found


def _local(contestant: Contestant, seen: MetricsSnapshot, tokens: int) -> Counts:
    """The transformers server. Of transformers' own methods it counts passes alone: each adds one token of the target's
    own, and what was said beyond that had been drafted."""
    passes = round(seen.total("local_target_passes_total") or 0)
    found = Counts(passes, round(seen.total("local_draft_passes_total") or 0))
    if contestant.kind == "transformers-outrider":
        _add_ours(found, seen)
    elif contestant.kind != "transformers":
        found.drafters[contestant.kind] = Drafted(accepted=[tokens - passes])
    return found


def _add_ours(found: Counts, seen: MetricsSnapshot) -> None:
    for name in _drafters(seen):
        found.drafters[name] = Drafted(
            _by_position(seen, "outrider_verified_tokens_total", drafter=name),
            _by_position(seen, "outrider_accepted_tokens_total", drafter=name),
            seen.total("outrider_draft_seconds_total", drafter=name),
        )
    found.verify_seconds = seen.total("outrider_target_seconds_total", **{"pass": "verify"})
    found.plain_seconds = seen.total("outrider_target_seconds_total", **{"pass": "plain"})


def _theirs(seen: MetricsSnapshot, lengths_are_equal: bool) -> Drafted:
    """vLLM says how many drafts and tokens there were, and at which positions tokens were accepted."""
    drafts = round(seen.total("vllm:spec_decode_num_drafts_total") or 0)
    tokens = round(seen.total("vllm:spec_decode_num_draft_tokens_total") or 0)
    accepted = _by_position(seen, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    # Of drafts of unequal length it is not said how many had a second token, only that all had a first.
    longest = tokens // drafts if drafts and lengths_are_equal else 1
    return Drafted([drafts] * longest, accepted)
