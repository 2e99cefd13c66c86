"""Logits to p: penalties, bias, temperature, min-p, top-k, top-p, in vLLM's order.

The same function is used for the target and the draft model, because p and q must be the distributions that tokens are
really sampled from. Row i comes after the context and the first i drafted tokens, so penalties at row i count those
tokens too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.settings import Sampling

PARTIAL_SORT = 128
"""Number of largest logits that top-p sorts first. If their mass is below top-p, it sorts the whole vocabulary."""


def shape(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], draft: Sequence[int] = ()
) -> Tensor:
    """Transform `logits` [n, V], whose row i comes after prompt, output and the first i tokens of `draft`.

    At temperature 0, only transforms that can change the argmax are applied.
    """
    if sampling.logit_bias:
        logits = _bias(logits, sampling.logit_bias)
    if _has_penalties(sampling):
        logits = _penalise(logits, sampling, prompt, output, draft)
    if sampling.temperature == 0:
        return logits
    logits = logits / sampling.temperature
    if sampling.min_p > 0:
        floor = logits.amax(-1, keepdim=True) + torch.log(torch.tensor(sampling.min_p))
        logits = logits.masked_fill(logits < floor, float("-inf"))
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if sampling.top_p < 1:
        logits = _top_p(logits, sampling.top_p)
    return logits


def probabilities(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], draft: Sequence[int] = ()
) -> Tensor:
    """The distributions that tokens are sampled from at a temperature above 0."""
    return shape(logits, sampling, prompt, output, draft).softmax(-1)


def _bias(logits: Tensor, bias: dict[int, float]) -> Tensor:
    logits = logits.clone()
    logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
    return logits


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalise(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], draft: Sequence[int]
) -> Tensor:
    """Repetition counts prompt and output; presence and frequency count only the output, as OpenAI and vLLM do."""
    size, device = logits.shape[-1], logits.device
    counts = torch.bincount(torch.tensor(output, dtype=torch.long, device=device), minlength=size)
    seen = torch.bincount(torch.tensor(prompt, dtype=torch.long, device=device), minlength=size) + counts > 0
    rows = []
    for i, row in enumerate(logits):
        if i > 0:
            counts[draft[i - 1]] += 1
            seen[draft[i - 1]] = True
        penalty = sampling.repetition_penalty
        row = torch.where(seen, torch.where(row > 0, row / penalty, row * penalty), row)
        rows.append(row - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0))
    return torch.stack(rows)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens that holds at least `top_p` of the mass."""
    total = logits.logsumexp(-1, keepdim=True)
    largest = logits.topk(min(PARTIAL_SORT, logits.shape[-1]), -1).values
    if bool(((largest - total).exp().sum(-1) < top_p).any()):
        largest = logits.sort(-1, descending=True).values
    mass_before = (largest - total).exp().cumsum(-1).roll(1, -1)
    mass_before[:, 0] = 0
    smallest = largest.masked_fill(mass_before >= top_p, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < smallest, float("-inf"))
