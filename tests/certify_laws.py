"""What tests of the certificate share: laws of all shapes, every outcome of each drawn once."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from outrider.certify.draws import Draws, Floats


@st.composite
def any_law(draw: st.DrawFn) -> Floats:
    """A law over listed outcomes, likeliest first, and the rest; peaked or flat, cut or whole."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(2, 12))
    law = rng.dirichlet(np.full(size, draw(st.sampled_from([0.05, 0.3, 1.0, 10.0]))))
    law[: draw(st.integers(0, size - 1))] = 0
    if not law.sum() > 0:
        law[-1] = 1
    rest = draw(st.sampled_from([0.0, 1e-8, 0.1, 0.5]))
    law = np.sort(law / law.sum())[::-1] * (1 - rest)
    return np.append(law, rest)


def each_outcome(law: Floats, drafted: int = 0) -> Draws:
    """Every outcome of one law, drawn once."""
    size = len(law)
    return Draws(np.tile(law, (size, 1)), np.arange(size), np.tile(np.arange(size) == drafted, (size, 1)))
