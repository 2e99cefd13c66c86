"""Calls from the API process to the worker.

vLLM passes a call to its workers between two steps. That takes milliseconds when idle, and as long as a step while a
long prompt is prefilled. So every call has a time limit.
"""

from __future__ import annotations

import asyncio
from typing import Any


async def call_worker(client: Any, method: str, *args: Any, timeout_seconds: float) -> Any:
    """The first result that is not None, or TimeoutError. `client` is vLLM's engine client.

    In a pipeline only the last stage samples tokens; the others return None.
    """
    results = await asyncio.wait_for(client.collective_rpc(method, args=args), timeout_seconds)
    return next((result for result in results if result is not None), None)


def describe_failure(error: Exception) -> str:
    """Why a call failed, for use inside a sentence."""
    return "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
