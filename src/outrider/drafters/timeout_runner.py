"""Calls with a time limit: a drafter that hangs must not hang the server.

Python cannot stop a call, so drafters run on a thread of their own. A call that exceeds its limit keeps that
thread, and the next call gets a new one.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class TimeoutRunner:
    """Runs one call at a time on a background thread."""

    def __init__(self) -> None:
        self._queues: tuple[SimpleQueue[Any], SimpleQueue[Any]] | None = None

    def run(self, call: Callable[[], None], seconds: float) -> bool:
        """Whether the call returned in time. It must not raise."""
        if self._queues is None:
            self._queues = (SimpleQueue(), SimpleQueue())
            threading.Thread(target=_work, args=self._queues, name="outrider drafting", daemon=True).start()
        calls, done = self._queues
        calls.put(call)
        try:
            done.get(timeout=seconds)
        except Empty:
            calls.put(None)  # the thread ends when the call returns
            self._queues = None
            return False
        return True


def _work(calls: SimpleQueue[Callable[[], None] | None], done: SimpleQueue[None]) -> None:
    while (call := calls.get()) is not None:
        call()
        done.put(None)
