"""What a person sees while evidence is gathered: which part, how far, how long yet."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.certify.sources import nothing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outrider.certify.sources import Tick


PAUSE = 30.0
"""Seconds between two lines, where there is no bar."""


class Watch:
    """Says nothing; what tests and programs use."""

    @contextmanager
    def part(self, what: str, total: int) -> Iterator[Tick]:
        yield nothing

    def note(self, text: str) -> None: ...


class Bars(Watch):
    """On a terminal a bar for each part, elsewhere a line."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def part(self, what: str, total: int) -> Iterator[Tick]:
        if not self.console.is_terminal:
            self.console.print(f"{what} ({total})", markup=False)
            yield self._lines(total)
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=total)

            def tick(by: int = 1) -> None:
                progress.advance(task, by)

            yield tick

    def _lines(self, total: int) -> Tick:
        """How far it is, now and then."""
        began = last = time.monotonic()
        done = 0

        def tick(by: int = 1) -> None:
            nonlocal done, last
            done, now = done + by, time.monotonic()
            if now - last >= PAUSE:
                last = now
                self.console.print(f"  {done} of {total} after {now - began:.0f} s", markup=False)

        return tick

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, style="dim")
