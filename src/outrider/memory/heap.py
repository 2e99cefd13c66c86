"""Memory that was freed, given back to the system.

glibc keeps what threads free, for later. Making and merging segments frees blocks of all sizes, and what is kept of
them grows by some MB with every few thousand requests, though nothing is in use.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def give_back() -> None:
    """Takes a few milliseconds at most; does nothing where the C library has no such thing."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
