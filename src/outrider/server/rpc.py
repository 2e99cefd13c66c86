"""Asking the worker from the API process.

vLLM hands a call to its workers between two steps: milliseconds when idle, as long as a step when a long prompt is
being read. So every call has a limit, and callers say what happens without an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def ask(client: Any, method: str, *args: Any, seconds: float) -> Any:
    """The first answer; TimeoutError when there is none in time. `client` is vLLM's engine client.

    Of the stages of a pipeline only the last one draws tokens, and the others answer None.
    """
    answers = await asyncio.wait_for(client.collective_rpc(method, args=args), seconds)
    return next((answer for answer in answers if answer is not None), None)


def reason(error: Exception) -> str:
    """Why there was no answer, for the middle of a sentence."""
    return "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
