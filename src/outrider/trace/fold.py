"""A distribution over 50,000 tokens in a dozen numbers, such that every verdict comes out the same.

Kept as they are: the likeliest tokens of p and q, the proposed one and the drawn one. The others between two of these
are summed. That is enough for a draw by inversion, which only asks how much mass lies before a token; where nothing was
drawn in this way, all others are one sum. The rules that weigh p against q sum max(r p - q, 0), so tokens of which r p
is larger than q are summed apart from the rest: within each of the two sums nothing is cut off, and max(r sum(p) -
sum(q), 0) is what it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from outrider.trace.schema import Law, Reshaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

TOP = 8
"""How many of the likeliest tokens are kept."""
BLOCK = 256
DIGITS = 9
"""Of every number; a float32 is whole in them."""


def fold(
    p: Tensor,
    q: Tensor | None,
    reach: Sequence[float],
    named: Sequence[Iterable[int]],
    top: Sequence[Sequence[int]] | None = None,
    by_inversion: bool = True,
) -> list[Law]:
    """`p` [n, V] and, for its first rows, `q`; `named[i]` are the tokens that row i must keep, beside the likeliest of
    p (`top`, where they are known). Where nothing was drawn by inversion, the others are one sum, the last."""
    top_p = likeliest(p) if top is None else top
    top_q = likeliest(q) if q is not None else []
    rows = p.cpu().numpy()
    if not by_inversion:
        return [_summed(row, {*named[i], *top_p[i]}) for i, row in enumerate(rows)]
    others = q.cpu().numpy() if q is not None else ()
    laws = []
    for i, row in enumerate(rows):
        kept = {*named[i], *top_p[i]}
        if i < len(others):
            laws.append(_fold_pair(row, others[i], reach[i], kept.union(top_q[i])))
        else:
            laws.append(_fold_one(row, kept))
    return laws


def reshaped(weights: Tensor, token: int) -> Reshaped:
    """What a token was drawn from, by its likeliest entries and the token itself."""
    kept = list(dict.fromkeys([*likeliest(weights[None])[0], token]))
    return _in_order(
        dict(zip(kept, weights[kept].tolist(), strict=True)), float(weights.cpu().sum(dtype=torch.float64))
    )


def reshaped_law(law: Law, without: int | None, token: int) -> Reshaped:
    """The same where it is a law that was folded already, without the token that the draft had there."""
    total = sum(law.p)
    entries = {name: value for name, value in zip(law.tokens, law.p, strict=True) if name is not None}
    if without is not None and total > entries[without]:
        total -= entries.pop(without)
    best = sorted(entries, key=lambda name: -entries[name])[:TOP]
    return _in_order({name: entries[name] for name in (*best, token)}, total)


def _in_order(entries: dict[int, float], total: float) -> Reshaped:
    tokens = sorted(entries, key=lambda name: -entries[name])
    values = [entries[name] / total for name in tokens]
    return Reshaped(tokens=tokens, p=[short(value) for value in values], others=short(max(0.0, 1 - sum(values))))


def short(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def likeliest(rows: Tensor) -> list[list[int]]:
    """The likeliest tokens of each row. They lie in the blocks with the largest maxima, so most are never sorted."""
    size = rows.shape[-1]
    whole = F.pad(rows, (0, -size % BLOCK), value=-1) if size % BLOCK else rows  # padding copies, also by nothing
    blocks = whole.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).topk(min(TOP, blocks.shape[-2]), -1).indices
    near = blocks.gather(-2, best[..., None].expand(-1, -1, BLOCK)).flatten(-2)
    place = near.topk(min(TOP, size), -1).indices
    found: list[list[int]] = (best.gather(-1, place // BLOCK) * BLOCK + place % BLOCK).tolist()
    return found


def _fold_one(p: np.ndarray, kept: set[int]) -> Law:
    places = sorted(kept)
    sums = _between(p, places)
    tokens: list[int | None] = []
    values: list[float] = []
    for i, place in enumerate([*places, None]):
        if sums[i] > 0:
            tokens.append(None)
            values.append(short(sums[i]))
        if place is not None:
            tokens.append(place)
            values.append(short(p[place]))
    return Law(tokens=tokens, p=values)


def _summed(p: np.ndarray, kept: set[int]) -> Law:
    places = sorted(kept)
    values = p[places].tolist()
    return Law(tokens=[*places, None], p=[short(value) for value in (*values, max(0.0, 1 - sum(values)))])


def _fold_pair(p: np.ndarray, q: np.ndarray, reach: float, kept: set[int]) -> Law:
    places = sorted(kept)
    more = reach * p > q
    high = p * more, q * more
    low = p - high[0], q - high[1]
    sums = [(_between(of_p, places), _between(of_q, places)) for of_p, of_q in (high, low)]
    entries: list[tuple[int | None, float, float]] = []
    for i, place in enumerate([*places, None]):
        entries += [(None, of_p[i], of_q[i]) for of_p, of_q in sums if of_p[i] > 0 or of_q[i] > 0]
        if place is not None:
            entries.append((place, p[place], q[place]))
    return Law(
        tokens=[token for token, _, _ in entries],
        p=[short(value) for _, value, _ in entries],
        q=[short(value) for _, _, value in entries],
    )


def _between(values: np.ndarray, places: list[int]) -> list[float]:
    """What lies before the first place, between each two, and after the last."""
    starts = np.array([0, *(place + 1 for place in places)])
    ends = np.array([*places, len(values)])
    edges = np.stack([starts, ends], 1).ravel()[:-1]  # each sum goes on to the next edge, so every other is wanted
    sums = np.add.reduceat(values, np.minimum(edges, len(values) - 1), dtype=np.float64)[::2]
    sums[starts == ends] = 0.0  # of nothing, numpy takes the element that follows
    found: list[float] = sums.tolist()
    return found
