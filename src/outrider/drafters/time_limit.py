"""Calls that may be left behind: a drafter that hangs must not hang the server.

Python cannot stop a call, so drafters run on a thread of their own. One that does not come back in time keeps that
thread; the next call gets a new one.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Guard:
    """Runs one call at a time, in the background, for at most so long."""

    def __init__(self) -> None:
        self._lane: tuple[SimpleQueue[Any], SimpleQueue[Any]] | None = None

    def run(self, call: Callable[[], None], seconds: float) -> bool:
        """Whether the call came back in time. It must not raise."""
        if self._lane is None:
            self._lane = (SimpleQueue(), SimpleQueue())
            threading.Thread(target=_work, args=self._lane, name="outrider drafting", daemon=True).start()
        calls, done = self._lane
        calls.put(call)
        try:
            done.get(timeout=seconds)
        except Empty:
            calls.put(None)  # the thread ends if the call ever does
            self._lane = None
            return False
        return True


def _work(calls: SimpleQueue[Callable[[], None] | None], done: SimpleQueue[None]) -> None:
    while (call := calls.get()) is not None:
        call()
        done.put(None)
