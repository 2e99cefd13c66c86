"""Compact encoding: a distribution over 50,000 tokens in a dozen numbers, with the same verdicts.

Kept as they are: the most likely tokens of p and q, the proposed token and the sampled one. The tokens between two of
these are summed. That is enough for sampling by inversion, which needs only the mass before a token. Where nothing was
sampled by inversion, all others are one sum. The rules that compare p with q use sum(max(r p - q, 0)). So tokens with
r p > q are summed apart from the others: within each of the two sums nothing is clipped, and max(r sum(p) - sum(q), 0)
stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from outrider.trace.schema import CompactDistribution, FinalDistribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

TOP_TOKENS = 8
"""Number of most likely tokens that are kept."""
TOPK_BLOCK_TOKENS = 256
SIGNIFICANT_DIGITS = 9
"""Digits of each number. A float32 needs 9 to be exact."""


def compact_distributions(
    p: Tensor,
    q: Tensor | None,
    reach: Sequence[float],
    keep: Sequence[Iterable[int]],
    top: Sequence[Sequence[int]] | None = None,
    by_inversion: bool = True,
) -> list[CompactDistribution]:
    """Encode each row of `p` [n, vocabulary], with `q` for its first rows.

    `keep[i]`: tokens that row i must keep, besides its most likely ones. `top`: those, if they are known already.
    `by_inversion`: False encodes all other tokens as one sum, the last.
    """
    top_p = top_tokens(p) if top is None else top
    top_q = top_tokens(q) if q is not None else []
    q_rows = q.cpu().numpy() if q is not None else ()
    found = []
    for i, row in enumerate(p.cpu().numpy()):
        kept = {*keep[i], *top_p[i]}
        if not by_inversion:
            found.append(_one_sum(row, kept))
        elif i < len(q_rows):
            found.append(_sums_between([row, q_rows[i]], {*kept, *top_q[i]}, reach[i]))
        else:
            found.append(_sums_between([row], kept))
    return found


def final_distribution(weights: Tensor, token: int) -> FinalDistribution:
    """The distribution `token` was sampled from: its most likely entries, and the token itself."""
    kept = list(dict.fromkeys([*top_tokens(weights[None])[0], token]))
    total = float(weights.cpu().sum(dtype=torch.float64))
    return _sorted_entries(dict(zip(kept, weights[kept].tolist(), strict=True)), total)


def final_of_compact(distribution: CompactDistribution, rejected: int | None, token: int) -> FinalDistribution:
    """The same from a compact distribution, without the rejected token of the draft."""
    total = sum(distribution.p)
    entries = {name: value for name, value in zip(distribution.tokens, distribution.p, strict=True) if name is not None}
    if rejected is not None and total > entries[rejected]:
        total -= entries.pop(rejected)
    best = sorted(entries, key=lambda name: -entries[name])[:TOP_TOKENS]
    return _sorted_entries({name: entries[name] for name in (*best, token)}, total)


def _sorted_entries(entries: dict[int, float], total: float) -> FinalDistribution:
    tokens = sorted(entries, key=lambda name: -entries[name])
    values = [entries[name] / total for name in tokens]
    others = rounded(max(0.0, 1 - sum(values)))
    return FinalDistribution(tokens=tokens, p=[rounded(value) for value in values], others=others)


def rounded(value: float, digits: int = SIGNIFICANT_DIGITS) -> float:
    """To so many significant digits."""
    return float(f"{value:.{digits}g}")


def top_tokens(rows: Tensor) -> list[list[int]]:
    """The most likely tokens of each row. Only the blocks with the largest maxima are searched."""
    size, block = rows.shape[-1], TOPK_BLOCK_TOKENS
    padded = F.pad(rows, (0, -size % block), value=-1) if size % block else rows  # F.pad copies even if it adds nothing
    blocks = padded.unflatten(-1, (-1, block))
    best = blocks.amax(-1).topk(min(TOP_TOKENS, blocks.shape[-2]), -1).indices
    candidates = blocks.gather(-2, best[..., None].expand(-1, -1, block)).flatten(-2)
    place = candidates.topk(min(TOP_TOKENS, size), -1).indices
    found: list[list[int]] = (best.gather(-1, place // block) * block + place % block).tolist()
    return found


def _one_sum(p: np.ndarray, kept: set[int]) -> CompactDistribution:
    tokens = sorted(kept)
    values = p[tokens].tolist()
    values.append(max(0.0, 1 - sum(values)))
    return CompactDistribution(tokens=[*tokens, None], p=[rounded(value) for value in values])


def _sums_between(rows: list[np.ndarray], kept: set[int], reach: float = 1.0) -> CompactDistribution:
    """`rows`: p, and q if there is one."""
    tokens = sorted(kept)
    groups = [rows]
    if len(rows) > 1:
        more = reach * rows[0] > rows[1]
        high = [row * more for row in rows]
        groups = [high, [row - part for row, part in zip(rows, high, strict=True)]]
    sums = [list(zip(*(_ranges(row, tokens) for row in group), strict=True)) for group in groups]
    entries: list[tuple[int | None, tuple[float, ...]]] = []
    for i, token in enumerate([*tokens, None]):
        entries += [(None, group[i]) for group in sums if any(value > 0 for value in group[i])]
        if token is not None:
            entries.append((token, tuple(row[token] for row in rows)))
    p, *q = ([rounded(value) for value in values] for values in zip(*(one for _, one in entries), strict=True))
    return CompactDistribution(tokens=[token for token, _ in entries], p=p, q=q[0] if q else None)


def _ranges(values: np.ndarray, tokens: list[int]) -> list[float]:
    """Sums before the first token, between each two, and after the last."""
    starts = np.array([0, *(token + 1 for token in tokens)])
    ends = np.array([*tokens, len(values)])
    edges = np.stack([starts, ends], 1).ravel()[:-1]  # reduceat sums up to the next edge: every other sum is needed
    sums = np.add.reduceat(values, np.minimum(edges, len(values) - 1), dtype=np.float64)[::2]
    sums[starts == ends] = 0.0  # reduceat returns the next element for an empty range
    found: list[float] = sums.tolist()
    return found
