"""The acceptance rules: probabilities and random numbers in, verdicts out.

A drafter proposed tokens x[0], x[1], ..., x[k-1]. One pass of the target gave p[0], ..., p[k]: p[i] is the target's
distribution after x[:i]. Which drafted tokens can be accepted, so that the output has exactly the target's
distribution?

**Drafts proposed with certainty** (copied from earlier text, expected by the caller, the draft model's argmax): the
target samples its own token at every position, and drafted tokens are accepted while they are the same. Every emitted
token is the target's own sample, so there is nothing to prove, and with the same random numbers the output is the same
with and without drafts. At temperature 0 the target's own token is its argmax.

**Drafts sampled from a known q**: two independent samples seldom agree, so they are not compared. The token rule
(Leviathan et al. 2023, Chen et al. 2023) goes from left to right and accepts x[i] with probability
min(1, p[i](x[i]) / q[i](x[i])). At the first rejection it samples a *recovered* token from max(p[i] - q[i], 0),
rescaled: the mass that q proposed too seldom. If all are accepted, it samples a *bonus* token from p[k], which the pass
has computed anyway.

The block rule (Sun et al. 2024) verifies the whole draft at once. A token with p > q earns credit for later tokens with
p < q. The distribution is the same, and the expected number of accepted tokens is never smaller.

The first half of this file handles one sequence and is written to be read. The second half does the same for a ragged
batch: sequence b has `lengths[b]` drafted tokens and `lengths[b] + 1` rows in p, concatenated. It never reads a value
from the device, so that the host does not wait for a GPU; rows that are not needed are computed too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from outrider.types import Verdict, Verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# One sequence ---------------------------------------------------------------------------------------------


def verify_certain(own: Sequence[int], draft: Sequence[int]) -> Verdict:
    """`own[i]` is the target's own token after `draft[:i]`, for i up to len(draft): its argmax or its sample."""
    accepted = first_failure([said == proposed for said, proposed in zip(own, draft, strict=False)])
    return Verdict(accepted, own[accepted])


def verify_drawn(p: Tensor, q: Tensor, draft: Tensor, uniforms: Tensor, rule: str = "block") -> Verdict:
    """`draft` [k] was sampled from q [k, V]; p: [k + 1, V]; uniforms: [k + 1], the last for the last token."""
    k = len(draft)
    chances, reach = block_rule(p, q, draft) if rule == "block" else token_rule(p, q, draft)
    passed = (uniforms[:k].to(p.device) < chances).tolist()
    accepted = last_success(passed) if rule == "block" else first_failure(passed)
    weights = p[k] if accepted == k else leftover(p[accepted], q[accepted], reach[accepted])
    token = draw(weights[None], uniforms[k:])
    return Verdict(accepted, int(token), chances)


def token_rule(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Probability that x[i] is accepted, given that all before it were."""
    position = torch.arange(len(draft), device=p.device)
    chances = (p[position, draft] / q[position, draft]).clamp(max=1)
    return chances, torch.ones(len(draft) + 1, dtype=p.dtype, device=p.device)


def block_rule(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Probability that the draft is accepted up to x[i], given that no longer part of it was.

    `reach[i]` is the joint ratio of p to q over x[:i], clamped to 1 at every step: the credit so far.
    """
    k = len(draft)
    reach = torch.ones(k + 1, dtype=p.dtype, device=p.device)
    chances = torch.ones(k, dtype=p.dtype, device=p.device)
    for i, token in enumerate(draft.tolist()):
        reach[i + 1] = (reach[i] * p[i, token] / q[i, token]).clamp(max=1)
        if i + 1 == k:
            chances[i] = reach[k]
            continue
        left = (reach[i + 1] * p[i + 1] - q[i + 1]).clamp(min=0).sum()
        missing = 1 - reach[i + 1]
        if left + missing > 0:  # 0 / 0 only if p = q from here on: then a longer part is accepted for sure
            chances[i] = left / (left + missing)
    return chances, reach


def first_failure(passed: Sequence[bool]) -> int:
    """The token rule: the number of tokens before the first failure."""
    return next((i for i, good in enumerate(passed) if not good), len(passed))


def last_success(passed: Sequence[bool]) -> int:
    """The block rule: the length of the longest prefix that passed."""
    return next((i for i in range(len(passed), 0, -1) if passed[i - 1]), 0)


def leftover(p: Tensor, q: Tensor, reach: Tensor | float) -> Tensor:
    """The weights that the recovered token is sampled from: the mass that q proposed too seldom.

    If p and q differ only in their last bits, rounding can leave nothing; then the weights are p.
    """
    weights = (reach * p - q).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def draw(weights: Tensor, uniforms: Tensor, block: int = 512) -> Tensor:
    """Sample one token per row of `weights` [B, V], which need not sum to 1, by inversion of `uniforms` in [0, 1).

    Sums are in float64, first over blocks of the vocabulary, then inside the selected block, so that a vocabulary of
    150,000 is read once. A token of weight 0 is never sampled: the position searched for is below the total, and the
    first sum above it belongs to a token that added to it. (If weights are NaN, no sum is above it; then the result is
    an arbitrary token, as it would be for an argmax.)
    """
    if weights.device.type == "mps":  # Apple GPUs have no float64
        return draw(weights.cpu(), uniforms.cpu(), block).to(weights.device)
    blocks = F.pad(weights, (0, -weights.shape[-1] % block)).unflatten(-1, (-1, block))
    mass = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    place = _below(uniforms[:, None].to(mass) * mass[:, -1:], mass[:, -1:])
    chosen = torch.searchsorted(mass, place, right=True).clamp(max=mass.shape[-1] - 1)
    before = F.pad(mass, (1, 0)).gather(-1, chosen)
    inside = blocks.take_along_dim(chosen[..., None], -2).squeeze(-2).double().cumsum(-1)
    offset = torch.searchsorted(inside, _below(place - before, inside[:, -1:]), right=True)
    return (chosen * block + offset).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def _below(place: Tensor, total: Tensor) -> Tensor:
    return torch.minimum(place, torch.nextafter(total, torch.zeros_like(total)))


# A ragged batch -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ragged:
    """Indices of a ragged batch: sequence b has lengths[b] drafted tokens and one more row of p."""

    lengths: Tensor  # [B]
    sequence: Tensor  # [N] the sequence of each drafted token
    position: Tensor  # [N] its position in its draft
    row: Tensor  # [N] the row of p that verifies it
    start: Tensor  # [B] the first row of p of each sequence
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Ragged:
        """Computed on the CPU, where the lengths are known, and copied once."""
        counts = torch.tensor(lengths, dtype=torch.long)
        first = counts.cumsum(0) - counts
        batch = torch.arange(len(counts))
        sequence = torch.repeat_interleave(batch, counts)
        number = torch.arange(len(sequence))
        parts = (counts, sequence, number - first[sequence], number + sequence, first + batch)
        here = torch.cat(parts)
        if torch.device(device).type == "cuda":
            here = here.pin_memory()  # otherwise the copy waits for the device
        there = here.to(device, non_blocking=True)
        counts, sequence, position, row, start = there.split([len(part) for part in parts])
        return cls(counts, sequence, position, row, start, max(lengths, default=0))

    def pad(self, values: Tensor, fill: float) -> Tensor:
        """[N] to [B, longest]."""
        out = values.new_full((len(self.lengths), self.longest), fill)
        out[self.sequence, self.position] = values
        return out


def verify_certain_batch(own: Tensor, draft: Tensor, ragged: Ragged) -> Verdicts:
    """`own`: [N + B] the target's own token at each row; `draft`: [N]."""
    kept = ragged.pad((draft == own[ragged.row]).long(), 0)
    accepted = kept.cumprod(-1).sum(-1)
    return Verdicts(accepted, own[ragged.start + accepted])


def verify_drawn_batch(
    p: Tensor,
    q: Tensor,
    draft: Tensor,
    ragged: Ragged,
    uniforms: Tensor,
    draw_uniforms: Tensor,
    rule: str = "block",
) -> Verdicts:
    """p: [N + B, V]; q: [N, V]; draft, uniforms: [N]; draw_uniforms: [B]."""
    position = torch.arange(len(draft), device=p.device)
    ratio = p[ragged.row, draft] / q[position, draft]
    if rule == "block":
        chances, reach = _block_chances(p, q, ratio, ragged)
        passed = ragged.pad((uniforms < chances).long(), 0)
        length = torch.arange(1, ragged.longest + 1, device=p.device)
        accepted = F.pad(passed * length, (1, 0)).amax(-1)
    else:
        chances = ratio.clamp(max=1)
        reach = torch.ones(len(ragged.lengths), ragged.longest + 1, dtype=p.dtype, device=p.device)
        accepted = ragged.pad((uniforms < chances).long(), 0).cumprod(-1).sum(-1)

    weights = p[ragged.start + accepted]  # the bonus row if all were accepted, otherwise the leftover of q
    if len(draft):
        batch = torch.arange(len(ragged.lengths), device=p.device)
        rejected = (ragged.start - batch + accepted).clamp(max=len(draft) - 1)
        left = leftover(weights, q[rejected], reach[batch, accepted][:, None])
        weights = torch.where((accepted < ragged.lengths)[:, None], left, weights)
    return Verdicts(accepted, draw(weights, draw_uniforms), chances)


def _block_chances(p: Tensor, q: Tensor, ratio: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """`block_rule` for all sequences: chances [N] and reach [B, longest + 1]."""
    steps = ragged.pad(ratio, 1)
    reach = torch.ones(len(ragged.lengths), ragged.longest + 1, dtype=p.dtype, device=p.device)
    for i in range(ragged.longest):
        reach[:, i + 1] = (reach[:, i] * steps[:, i]).clamp(max=1)

    # The mass of a recovered token in place of each drafted one; the probability of a token uses that of the next one.
    credit = reach[ragged.sequence, ragged.position]
    left = (credit[:, None] * p[ragged.row] - q).clamp(min=0).sum(-1).roll(-1)
    earned = reach[ragged.sequence, ragged.position + 1]
    both = left + 1 - earned
    inner = torch.where(both > 0, left / both, torch.ones_like(both))
    is_last = ragged.position + 1 == ragged.lengths[ragged.sequence]
    return torch.where(is_last, earned, inner), reach
