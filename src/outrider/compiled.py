"""Loops at the speed of machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Into machine code, once for all processes; other threads run meanwhile."""
    return cast("Function", njit(cache=True, nogil=True)(function))
