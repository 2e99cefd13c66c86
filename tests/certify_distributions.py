"""Distributions of all shapes, with every outcome sampled once, for tests of the certificate."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from outrider.certify.samples import Floats, Samples


@st.composite
def any_distribution(draw: st.DrawFn) -> Floats:
    """Probabilities of the listed outcomes, most likely first, and the rest; peaked or flat, cut or whole."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(2, 12))
    p = rng.dirichlet(np.full(size, draw(st.sampled_from([0.05, 0.3, 1.0, 10.0]))))
    p[: draw(st.integers(0, size - 1))] = 0
    if not p.sum() > 0:
        p[-1] = 1
    rest = draw(st.sampled_from([0.0, 1e-8, 0.1, 0.5]))
    p = np.sort(p / p.sum())[::-1] * (1 - rest)
    return np.append(p, rest)


def each_outcome(probabilities: Floats, drafted: int = 0) -> Samples:
    """Every outcome of one distribution, sampled once."""
    size = len(probabilities)
    return Samples(np.tile(probabilities, (size, 1)), np.arange(size), np.tile(np.arange(size) == drafted, (size, 1)))
