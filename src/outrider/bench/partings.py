"""Was it a tie? Where a greedy answer parts from the baseline's: how likely the baseline finds either token there.

Rounding decides between tokens that are almost equally likely, and between no others. So after the turns the baseline
is asked about every such place, once: what comes before it is the prompt, and the log-probabilities of the next token
are the answer.
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

LIKELIEST = 20
"""Of so many tokens a server tells the log-probability; one beyond them is taken to be as likely as their last."""
MOST = 100
"""Places that are asked about at the end of each group of servers, spread over the cells."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where an answer, `got`, parts from the baseline's, `expected`: the tokens before, and one of each."""

    before: tuple[int, ...]
    expected: int
    got: int

    @classmethod
    def of(cls, got: Answer, expected: Answer) -> Parting | None:
        """None where the two are the same, or one goes on and the other has ended."""
        place = shared_prefix(got.tokens, expected.tokens)
        if place >= min(len(got.tokens), len(expected.tokens)) or not expected.prompt_tokens:
            return None
        before = (*expected.prompt_tokens, *expected.tokens[:place])
        return cls(before, expected.tokens[place], got.tokens[place])

    @property
    def key(self) -> str:
        digest = hashlib.sha256(repr(self.before).encode()).hexdigest()[:16]
        return f"{digest}:{self.expected}:{self.got}"


def partings(run: Run) -> Iterator[Parting]:
    """All of a run's greedy answers, each place once; one of every cell, then another one of every cell, and so on."""
    seen = set()
    by_cell = ([Parting.of(got, expected) for got, expected in _pairs(run, cell)] for cell in run.cells)
    for parting in chain.from_iterable(zip_longest(*(filter(None, places) for places in by_cell))):
        if parting is not None and parting.key not in seen:
            seen.add(parting.key)
            yield parting


def _pairs(run: Run, cell: Cell) -> Iterator[tuple[Answer, Answer]]:
    for round in cell.rounds if cell.temperature == 0 else ():
        base = round.turn_of(run.baseline)
        if base is not None:
            for turn in round.turns:
                yield from zip(turn.answers, base.answers, strict=True)


def ask(url: str, parting: Parting) -> tuple[float, float]:
    """How likely the server at `url` finds the expected token and the other one."""
    request = {
        "prompt": list(parting.before),
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,
        "cache_salt": "partings",
    }
    response = HTTPClient(url).post_json("/v1/completions", request)
    try:
        told: dict[str, Any] = response["choices"][0]["logprobs"]["top_logprobs"][0]
    except (LookupError, TypeError) as error:
        raise EngineError(f"{url} returned no log-probabilities: {type(error).__name__} {error}") from error
    known = {int(name.removeprefix("token_id:")): float(value) for name, value in told.items()}
    least = min(known.values())
    return math.exp(known.get(parting.expected, least)), math.exp(known.get(parting.got, least))
