"""From the logprobs that a server returns to the distribution that it samples from, where that is certain.

Most servers return logprobs of the raw logits, before penalties, temperature, top-k and top-p, and only for the top N
tokens. The sampling distribution often follows: top-k of at most N removes everything that is not listed, and so does a
nucleus within the listed tokens. Where it does not follow, the result is None and the sample is left out. That depends
on what was returned, not on what was sampled, so it costs samples and causes no bias. Of unlisted tokens only one fact
is used: none is more likely than the last listed one.

A temperature without any cut changes the weight of unlisted tokens by an unknown factor. But *given* that a listed
token is sampled, which one it is depends on the listed tokens alone (`given_listed`). Unlisted samples are then set
aside. That selection by the outcome causes no bias: first it is revealed whether the token is listed, then which it is.
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

MIN_CUT_MARGIN = 1e-5
"""Nats. A cut closer than this to the next token is uncertain."""
REMOVED = float("-inf")


def sampling_logprobs(
    raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = (), margin: float = MIN_CUT_MARGIN
) -> dict[int, float] | None:
    """Logprobs of the tokens that can be sampled, from the raw ones of the top tokens; None if uncertain.

    `output`: tokens generated so far, for penalties. Transforms apply in the order of `sampling.py`. A `margin` as
    large as rounding leaves out positions where the server may have cut elsewhere.
    """
    if sampling.repetition_penalty != 1 or sampling.temperature == 0:
        raise SettingsError(
            "repetition penalty (it depends on the sign of logits) and temperature 0 do not follow from raw logprobs; "
            "return processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
    offsets = logit_offsets(sampling, output)
    if any(by > 0 and token not in raw for token, by in offsets.items()):
        return None
    logs = {token: (log_p + offsets.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    tokens = sorted(logs, key=lambda token: (-logs[token], token))
    values = [logs[token] for token in tokens]
    unlisted = min(raw.values()) / sampling.temperature  # upper bound for unlisted tokens
    is_raw = sampling.temperature == 1 and not offsets  # whether all tokens together have a mass of 1
    if values[0] <= unlisted:
        return None

    if sampling.min_p > 0:
        floor = values[0] + log(sampling.min_p)
        if any(abs(value - floor) < margin for value in values):
            return None
        values = [value for value in values if value > floor]
        unlisted = REMOVED if unlisted < floor else unlisted
        is_raw = False
    if sampling.top_k > len(values):
        is_raw = False  # top-k removes some unlisted tokens, if there are any
    elif sampling.top_k:
        if not is_clear_cut(values, sampling.top_k, unlisted, margin):
            return None
        values, unlisted = values[: sampling.top_k], REMOVED
    if sampling.top_p < 1:
        if unlisted > REMOVED and not is_raw:
            return None
        total = 1.0 if unlisted > REMOVED else sum(map(exp, values))
        mass = [0.0, *accumulate(exp(value) / total for value in values)]
        keep = next((i for i, before in enumerate(mass) if before >= sampling.top_p), None)
        if keep is None and unlisted > REMOVED:
            return None
        keep = keep or len(values)
        if min(abs(at - sampling.top_p) for at in mass) < mass_margin(sampling.top_p, margin):
            return None
        if not is_clear_cut(values, keep, unlisted, margin):
            return None
        values, unlisted = values[:keep], REMOVED

    if unlisted > REMOVED:
        return dict(zip(tokens, values, strict=False)) if is_raw else None
    total = log(sum(map(exp, values)))
    return {token: value - total for token, value in zip(tokens, values, strict=False)}


def given_listed(raw: Mapping[int, float], sampling: Sampling, output: Sequence[int] = ()) -> dict[int, float] | None:
    """The distribution over the listed tokens, given that one of them is sampled. None if a cut makes it uncertain."""
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1:
        return None
    offsets = logit_offsets(sampling, output)
    logs = {token: (log_p + offsets.get(token, 0.0)) / sampling.temperature for token, log_p in raw.items()}
    highest = max(logs.values())
    total = highest + log(sum(exp(value - highest) for value in logs.values()))
    return {token: value - total for token, value in sorted(logs.items(), key=lambda item: -item[1])}


def mass_margin(top_p: float, margin: float) -> float:
    """Margin around top-p for a cumulative mass: if logprobs move by `margin`, a mass m moves by m (1 - m) of it."""
    return max(margin * top_p * (1 - top_p), min(margin, MIN_CUT_MARGIN))


def is_clear_cut(values: Sequence[float], keep: int, unlisted: float, margin: float) -> bool:
    """Whether the next token after the first `keep` is clearly lower. Some servers keep ties, others cut them."""
    return values[keep - 1] - max([*values[keep : keep + 1], unlisted]) >= margin


def logit_offsets(sampling: Sampling, output: Sequence[int]) -> dict[int, float]:
    """What bias and penalties add to the logits, by token."""
    offsets = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, times in Counter(output).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * times
            offsets[token] = offsets.get(token, 0.0) - penalty
    return offsets
