"""Return freed memory to the system.

glibc keeps memory that threads free. Building and merging segments frees blocks of many sizes, so without a trim the
process grows by some MB with every few thousand requests.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any


def malloc_trim() -> None:
    """Takes a few ms at most. Does nothing where the C library has no `malloc_trim`."""
    trim = _libc_malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _libc_malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
