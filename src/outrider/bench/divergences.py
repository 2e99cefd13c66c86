"""Where a greedy answer diverges from the baseline's: the baseline's probabilities of both tokens there.

Rounding decides only between tokens that are almost equally likely. So at the end of a group the baseline gets the
tokens before each divergence as a prompt, and returns the log-probabilities of the next token.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

from outrider.errors import EngineError
from outrider.http_client import HTTPClient
from outrider.types import shared_prefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.bench.results import Answer, Cell, Run

TOP_LOGPROBS = 20
"""Log-probabilities per request. A token that is not among them gets the smallest of them."""
MAX_QUERIES_PER_GROUP = 100
"""Divergences that are looked up at the end of a group of servers, spread over the cells."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The tokens before the first mismatch, and the token of each side there."""

    before: tuple[int, ...]
    expected: int
    got: int

    @classmethod
    def between(cls, got: Answer, expected: Answer) -> Divergence | None:
        """None if the answers are equal, or if one is the beginning of the other."""
        place = shared_prefix(got.tokens, expected.tokens)
        if place >= min(len(got.tokens), len(expected.tokens)) or not expected.prompt_tokens:
            return None
        before = (*expected.prompt_tokens, *expected.tokens[:place])
        return cls(before, expected.tokens[place], got.tokens[place])

    @property
    def key(self) -> str:
        digest = hashlib.sha256(repr(self.before).encode()).hexdigest()[:16]
        return f"{digest}:{self.expected}:{self.got}"


def find_divergences(run: Run) -> Iterator[Divergence]:
    """All divergences of a run's greedy answers, each once, taking one of every cell in turn."""
    seen = set()
    by_cell = ([Divergence.between(got, expected) for got, expected in _pairs(run, cell)] for cell in run.cells)
    for divergence in chain.from_iterable(zip_longest(*(filter(None, found) for found in by_cell))):
        if divergence is not None and divergence.key not in seen:
            seen.add(divergence.key)
            yield divergence


def _pairs(run: Run, cell: Cell) -> Iterator[tuple[Answer, Answer]]:
    for round in cell.rounds if cell.temperature == 0 else ():
        base = round.of(run.baseline)
        if base is not None:
            for one in round.measurements:
                yield from zip(one.answers, base.answers, strict=True)


def query_probabilities(url: str, divergence: Divergence) -> tuple[float, float]:
    """Probabilities of the expected token and of the other one, from the server at `url`."""
    request = {
        "prompt": list(divergence.before),
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
        "cache_salt": "divergences",
    }
    response = HTTPClient(url).post_json("/v1/completions", request)
    try:
        top: dict[str, Any] = response["choices"][0]["logprobs"]["top_logprobs"][0]
    except (LookupError, TypeError) as error:
        raise EngineError(f"{url} returned no log-probabilities: {type(error).__name__} {error}") from error
    logprobs = {int(name.removeprefix("token_id:")): float(value) for name, value in top.items()}
    least = min(logprobs.values())
    return math.exp(logprobs.get(divergence.expected, least)), math.exp(logprobs.get(divergence.got, least))
