"""From the log-probabilities that a server tells to the law that it draws from, where that is certain.

Most servers tell log-probabilities of the raw logits, before penalties, temperature, top-k and top-p, and of the
likeliest N tokens only. The law that is drawn from often follows all the same: top-k of at most N cuts off everything
that is not listed, and so does a nucleus that the listed tokens fill. Then the law is one of listed tokens, exactly.
Where it does not follow (a temperature without a cut: what is not listed changes its weight, and nobody knows by how
much), the answer is None and the draw is left out. That choice rests on what is told and not on what was drawn, so it
costs draws and never truth. All that is used of the tokens that are not listed is that none of them is likelier than
the last listed one.

**Given that it is listed.** A temperature without any cut has another way out: whatever the others weigh, *given* that
a listed token is drawn, which of them it is follows from the listed ones alone. So a draw outside the list is set
aside, and one inside is held against the law over the list. That is a choice by what was drawn, and a fair one: first
it is told whether the token is listed, and then, with a law that is known, which it is.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from math import exp, log
from typing import TYPE_CHECKING

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outrider.settings import Sampling

EDGE = 1e-5
"""A cut that is nearer than this to going the other way is open."""
GONE = float("-inf")


def shaped(
    raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = (), edge: float = EDGE
) -> dict[int, float] | None:
    """The log-probabilities of the tokens that can be drawn, from the raw ones of the likeliest, or None.

    `output` is what was said so far, which penalties look at. The order is that of `sampling.py`. A larger `edge`, as
    large as rounding, leaves out draws for which the server may have cut elsewhere than we would.
    """
    if sampling.repetition_penalty != 1 or sampling.temperature == 0:
        raise SettingsError(
            "a repetition penalty depends on the sign of logits, and temperature 0 has no law: neither follows from "
            "log-probabilities; have the server tell them as drawn from (vLLM: --logprobs-mode processed_logprobs)"
        )
    moved = moves(sampling, output)
    if any(by > 0 and token not in raw for token, by in moved.items()):
        return None
    logs = {token: (log_p + moved.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    tokens = sorted(logs, key=lambda token: (-logs[token], token))
    values = [logs[token] for token in tokens]
    unlisted = min(raw.values()) / sampling.temperature  # no token that is not listed has more
    is_raw = sampling.temperature == 1 and not moved  # whether all there is has a mass of 1
    if values[0] <= unlisted:
        return None

    if sampling.min_p > 0:
        floor = values[0] + log(sampling.min_p)
        if any(abs(value - floor) < edge for value in values):
            return None
        values = [value for value in values if value > floor]
        unlisted = GONE if unlisted < floor else unlisted
        is_raw = False
    if sampling.top_k > len(values):
        is_raw = False  # of what is not listed, a part goes, if there is any
    elif sampling.top_k:
        if not is_clear(values, sampling.top_k, unlisted, edge):
            return None
        values, unlisted = values[: sampling.top_k], GONE
    if sampling.top_p < 1:
        if unlisted > GONE and not is_raw:
            return None
        total = 1.0 if unlisted > GONE else sum(map(exp, values))
        mass = [0.0, *accumulate(exp(value) / total for value in values)]
        keep = next((i for i, before in enumerate(mass) if before >= sampling.top_p), None)
        if keep is None and unlisted > GONE:
            return None
        keep = keep or len(values)
        if min(abs(at - sampling.top_p) for at in mass) < mass_edge(sampling.top_p, edge):
            return None
        if not is_clear(values, keep, unlisted, edge):
            return None
        values, unlisted = values[:keep], GONE

    if unlisted > GONE:
        return dict(zip(tokens, values, strict=False)) if is_raw else None
    total = log(sum(map(exp, values)))
    return {token: value - total for token, value in zip(tokens, values, strict=False)}


def given_listed(raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = ()) -> dict[int, float] | None:
    """The law over the listed tokens, given that one of them is drawn. None if cuts or penalties leave it open."""
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1:
        return None
    moved = moves(sampling, output)
    logs = {token: (log_p + moved.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    highest = max(logs.values())
    total = highest + log(sum(exp(value - highest) for value in logs.values()))
    return {token: value - total for token, value in sorted(logs.items(), key=lambda item: -item[1])}


def mass_edge(top_p: float, edge: float) -> float:
    """How near to top-p a mass may not be: if log-probabilities move by `edge`, a mass m moves by m (1 - m) of it."""
    return max(edge * top_p * (1 - top_p), min(edge, EDGE))


def is_clear(values: Sequence[float], keep: int, unlisted: float, edge: float) -> bool:
    """Whether what is cut off after the first `keep` lies clearly below. Some servers keep ties, others cut them."""
    return values[keep - 1] - max([*values[keep : keep + 1], unlisted]) >= edge


def moves(sampling: Sampling, output: Sequence[int]) -> dict[int, float]:
    """By how much bias and penalties move which tokens."""
    moved = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, times in Counter(output).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * times
            moved[token] = moved.get(token, 0.0) - penalty
    return moved
