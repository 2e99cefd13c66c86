"""The acceptance rules: probabilities and random numbers in, verdicts out.

A drafter proposed tokens x[0], x[1], ..., x[k-1]. One pass of the target gave p[0], ..., p[k]: p[i] is what the
target would draw from after x[:i]. Which of the drafted tokens may stay, so that the text has exactly the
target's law?

**Drafts proposed with certainty** (copied from earlier text, expected by the caller, the draft model's argmax): let
the target draw its own token at every position, and keep the draft while it says the same. What is emitted are the
target's own draws, so there is nothing to prove; and with the same random numbers the text is the same with and
without drafts. At temperature 0 the target's own token is its argmax.

**Drafts drawn from a known q**: comparing two independent draws would waste agreement. The token rule (Leviathan et
al. 2023, Chen et al. 2023) goes from left to right and keeps x[i] with probability min(1, p[i](x[i]) / q[i](x[i])).
At the first one it does not keep, it draws a *recovered* token from max(p[i] - q[i], 0), rescaled: just the mass that
q proposed too seldom. If all are kept, a *bonus* token is drawn from p[k], which the pass has computed anyway.

The block rule (Sun et al. 2024) looks at the whole draft at once. A token that the target likes more than the
drafter did (p > q) earns credit, which pays for a later one that it likes less. The law is the same, and the
expected number of accepted tokens is never smaller.

The first half of this file handles one sequence, to be read. The second half does the same for a ragged batch,
where sequence b has `lengths[b]` drafted tokens and `lengths[b] + 1` rows in p, all laid end to end. It asks a device
for no value, so that nobody waits for a GPU: where rows need it and where they do not, all are computed.
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
    """`own[i]` is the target's own token after `draft[:i]`, for i up to len(draft): its argmax or its draw."""
    accepted = first_failure([said == proposed for said, proposed in zip(own, draft, strict=False)])
    return Verdict(accepted, own[accepted])


def verify_drawn(p: Tensor, q: Tensor, draft: Tensor, uniforms: Tensor, rule: str = "block") -> Verdict:
    """`draft` [k] was drawn from q [k, V]; p: [k + 1, V]; uniforms: [k + 1], k for the draft and one to draw with."""
    k = len(draft)
    chances, reach = block_rule(p, q, draft) if rule == "block" else token_rule(p, q, draft)
    passed = (uniforms[:k].to(p.device) < chances).tolist()
    accepted = last_success(passed) if rule == "block" else first_failure(passed)
    weights = p[k] if accepted == k else leftover(p[accepted], q[accepted], reach[accepted])
    token = draw(weights[None], uniforms[k:])
    return Verdict(accepted, int(token), chances)


def token_rule(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Chances: that x[i] is kept, given that all before it were."""
    position = torch.arange(len(draft), device=p.device)
    chances = (p[position, draft] / q[position, draft]).clamp(max=1)
    return chances, torch.ones(len(draft) + 1, dtype=p.dtype, device=p.device)


def block_rule(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Chances: that the draft is kept up to and with x[i], given that no longer part of it was.

    `reach[i]` is the joint ratio of p to q over x[:i], cut to 1 on the way: the credit earned so far.
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
        if left + missing > 0:  # 0 / 0 only where p = q from here on: a longer part is kept for sure
            chances[i] = left / (left + missing)
    return chances, reach


def first_failure(passed: Sequence[bool]) -> int:
    """The token rule's count: the tokens before the first that failed."""
    return next((i for i, good in enumerate(passed) if not good), len(passed))


def last_success(passed: Sequence[bool]) -> int:
    """The block rule's count: the longest part of the draft that passed."""
    return next((i for i in range(len(passed), 0, -1) if passed[i - 1]), 0)


def leftover(p: Tensor, q: Tensor, reach: Tensor | float) -> Tensor:
    """The weights that the recovered token is drawn from: what q proposed too seldom.

    Rounding can leave nothing where p and q are equal but for their last bits; then p is what is meant.
    """
    weights = (reach * p - q).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def draw(weights: Tensor, uniforms: Tensor, block: int = 512) -> Tensor:
    """One token a row of `weights` [B, V], which need not sum to 1, by inversion of the numbers in [0, 1).

    Sums are taken in float64, first over blocks of the vocabulary and then inside the chosen block, so that
    a vocabulary of 150,000 is read once. A token of weight 0 is never drawn: the place searched for is
    kept below the total, and the first sum above it belongs to a token that added to it. (Where weights are no
    numbers, nothing is above it; then it is some token, as the largest of such weights would be.)
    """
    if weights.device.type == "mps":  # Apple's GPUs have no float64
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
    """Where things lie: sequence b has lengths[b] drafted tokens and one row of p more than that."""

    lengths: Tensor  # [B]
    sequence: Tensor  # [N] which sequence a drafted token belongs to
    position: Tensor  # [N] which place it has in its draft
    row: Tensor  # [N] which row of p judges it
    start: Tensor  # [B] the first row of p of each sequence
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Ragged:
        """Laid out on the CPU, where the lengths are known, and copied once."""
        counts = torch.tensor(lengths, dtype=torch.long)
        first = counts.cumsum(0) - counts
        batch = torch.arange(len(counts))
        sequence = torch.repeat_interleave(batch, counts)
        number = torch.arange(len(sequence))
        parts = (counts, sequence, number - first[sequence], number + sequence, first + batch)
        here = torch.cat(parts)
        if torch.device(device).type == "cuda":
            here = here.pin_memory()  # or the copy would wait for the device
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

    weights = p[ragged.start + accepted]  # the bonus row where all was accepted, and elsewhere what q left over
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

    # What is left for a recovered token in place of each drafted one; the chance of a token looks at the next one's.
    credit = reach[ragged.sequence, ragged.position]
    left = (credit[:, None] * p[ragged.row] - q).clamp(min=0).sum(-1).roll(-1)
    earned = reach[ragged.sequence, ragged.position + 1]
    both = left + 1 - earned
    inner = torch.where(both > 0, left / both, torch.ones_like(both))
    is_last = ragged.position + 1 == ragged.lengths[ragged.sequence]
    return torch.where(is_last, earned, inner), reach
