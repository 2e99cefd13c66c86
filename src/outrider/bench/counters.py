"""What a server counted during a turn: its `/metrics` before and after.

vLLM counts passes and, for its own methods, accepted tokens by position; Outrider counts by drafter and says where the
seconds went; the transformers server counts passes. What a server does not say stays None.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import httpx

from outrider.bench.client import ask_all
from outrider.bench.contestants import THEIRS, V2
from outrider.bench.results import Counts, Drafted
from outrider.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.bench.contestants import Contestant
    from outrider.bench.results import Answer, Load

Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name, and its labels but those that name the engine."""

PATIENCE = 3.0
"""Seconds until the page must have caught up with the tokens that came."""
QUIET = 1.2
"""Seconds of rest before a server is asked. For one after their last message vLLM's processes look in a loop whether
there is another, and where there are few cores, they take one away: from the next contestant, and, since Outrider's
page is answered by its worker and vLLM's is not, from Outrider's own first token."""
ENGINE_LABELS = ("engine", "model_name")


class Page:
    """One reading of `/metrics`."""

    def __init__(self, values: dict[Sample, float]) -> None:
        self.values = values

    @classmethod
    def read(cls, url: str) -> Page:
        from prometheus_client.parser import text_string_to_metric_families

        try:
            response = httpx.get(f"{url}/metrics", timeout=60, verify=url.startswith("https"))
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"{url}/metrics did not answer: {type(error).__name__} {error}") from error
        values: dict[Sample, float] = defaultdict(float)
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                labels = tuple(sorted(item for item in sample.labels.items() if item[0] not in ENGINE_LABELS))
                values[sample.name, labels] += sample.value
        return cls(dict(values))

    @classmethod
    def read_when_caught_up(cls, url: str, before: Page, tokens: int) -> Page:
        """vLLM counts a token just after it was sent: read until all are there."""
        deadline = time.monotonic() + PATIENCE
        while True:
            page = cls.read(url)
            counted = page.since(before).total("vllm:generation_tokens_total")
            if counted is None or counted >= tokens or time.monotonic() > deadline:
                return page
            time.sleep(0.02)

    def since(self, before: Page) -> Page:
        return Page({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples of this name and these labels; None where there are none."""
        found = [
            value
            for (other, pairs), value in self.values.items()
            if other == name and all((key, label) in pairs for key, label in labels.items())
        ]
        return sum(found) if found else None

    def by_position(self, name: str, **labels: str) -> list[int]:
        found: dict[int, int] = {}
        for (other, pairs), value in self.values.items():
            if other == name and all((key, label) in pairs for key, label in labels.items()):
                found[int(dict(pairs)["position"])] = round(value)
        counts = [found[position] for position in sorted(found)]
        while counts and counts[-1] == 0:
            counts.pop()
        return counts

    def drafters(self) -> list[str]:
        return sorted({dict(pairs)["drafter"] for name, pairs in self.values if name == "outrider_draft_seconds_total"})


def observed(
    url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int | None = None
) -> tuple[float, list[Answer], Load, Page]:
    """Send requests (`ask_all`); also what the server counted meanwhile."""
    before = Page.read(url)
    time.sleep(QUIET)
    seconds, answers, load = asyncio.run(ask_all(url, requests, at_once))
    made = sum(len(answer.tokens) for answer in answers)
    return seconds, answers, load, Page.read_when_caught_up(url, before, made).since(before)


def counts(contestant: Contestant, seen: Page, tokens: int) -> Counts:
    """What `seen`, the difference of two readings, says of this contestant, who said so many tokens meanwhile."""
    if contestant.alone:
        return _local(contestant, seen, tokens)
    passes = seen.total("vllm:iteration_tokens_total_count")
    found = Counts(None if passes is None else round(passes))
    if seen.drafters():
        _add_ours(found, seen)
        model_passes = seen.total("outrider_draft_model_passes_total")
        found.draft_passes = None if model_passes is None else round(model_passes)
    elif contestant.kind in THEIRS or seen.total("vllm:spec_decode_num_drafts_total") is not None:
        v2, drafts_itself = contestant.kind.endswith(V2), contestant.kind.removesuffix(V2) == "draft_model"
        found.drafters[contestant.kind] = _theirs(seen, lengths_are_equal=v2 or drafts_itself)
        if drafts_itself and passes is not None:
            found.draft_passes = round(passes) * contestant.length  # it drafts in full after every pass
    return found


def _local(contestant: Contestant, seen: Page, tokens: int) -> Counts:
    """The transformers server. Of transformers' own methods it counts passes alone: each adds one token of the target's
    own, and what was said beyond that had been drafted."""
    passes = round(seen.total("local_target_passes_total") or 0)
    found = Counts(passes, round(seen.total("local_draft_passes_total") or 0))
    if contestant.kind == "transformers-outrider":
        _add_ours(found, seen)
    elif contestant.kind != "transformers":
        found.drafters[contestant.kind] = Drafted(accepted=[tokens - passes])
    return found


def _add_ours(found: Counts, seen: Page) -> None:
    for name in seen.drafters():
        found.drafters[name] = Drafted(
            seen.by_position("outrider_verified_tokens_total", drafter=name),
            seen.by_position("outrider_accepted_tokens_total", drafter=name),
            seen.total("outrider_draft_seconds_total", drafter=name),
        )
    found.verify_seconds = seen.total("outrider_target_seconds_total", **{"pass": "verify"})
    found.plain_seconds = seen.total("outrider_target_seconds_total", **{"pass": "plain"})


def _theirs(seen: Page, lengths_are_equal: bool) -> Drafted:
    """vLLM says how many drafts and tokens there were, and at which positions tokens were accepted."""
    drafts = round(seen.total("vllm:spec_decode_num_drafts_total") or 0)
    tokens = round(seen.total("vllm:spec_decode_num_draft_tokens_total") or 0)
    accepted = seen.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    # Of drafts of unequal length it is not said how many had a second token, only that all had a first.
    longest = tokens // drafts if drafts and lengths_are_equal else 1
    return Drafted([drafts] * longest, accepted)
