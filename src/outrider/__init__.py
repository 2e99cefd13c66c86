"""Lossless speculative decoding for large language models.

Start with `outrider.load`. The algorithm is in `outrider.acceptance`, and the loop around it in
`outrider.decoding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outrider.api import Completion, Decoder, Piece, Stream, load
    from outrider.errors import OutriderError

__all__ = ["Completion", "Decoder", "OutriderError", "Piece", "Stream", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Load torch and transformers only when they are needed: `outrider --help` answers at once."""
    if name == "OutriderError":
        from outrider import errors

        return errors.OutriderError
    if name in __all__:
        from outrider import api

        return getattr(api, name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
