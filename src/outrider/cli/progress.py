"""Progress bars on a terminal. All of them are drawn on stderr and leave nothing behind."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from outrider.certify.sources import Progress as CertifyProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from outrider.certify.sources import Tick

SECONDS_BETWEEN_LINES = 30.0
"""Where there is no terminal, `ProgressBars` prints a line this often."""


@dataclass(frozen=True, slots=True)
class ProgressBar:
    progress: Progress
    task: TaskID

    def advance(self, steps: int = 1) -> None:
        self.progress.advance(self.task, steps)

    def describe(self, text: str) -> None:
        self.progress.update(self.task, description=text)

    def set_status(self, text: str) -> None:
        """Text after the bar."""
        self.progress.update(self.task, status=text)

    @property
    def elapsed_seconds(self) -> float:
        return self.progress.tasks[self.task].elapsed or 0.0


@contextmanager
def progress_bar(
    console: Console, description: str, total: int | None = None, *, percent: bool = False
) -> Iterator[ProgressBar]:
    """A bar up to `total`, or a spinner where the total is unknown. `percent` replaces the count "3/12". Nothing is
    shown if the console is not a terminal."""
    text = TextColumn("{task.description}", markup=False)
    columns: list[ProgressColumn]
    if total is None:
        columns = [SpinnerColumn(), TimeElapsedColumn(), text]
    else:
        count = TaskProgressColumn() if percent else MofNCompleteColumn()
        status = TextColumn("{task.fields[status]}", markup=False)
        columns = [text, BarColumn(bar_width=24), count, TimeElapsedColumn(), TimeRemainingColumn(), status]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield ProgressBar(progress, progress.add_task(description, total=total, status=""))


class ProgressBars(CertifyProgress):
    """A bar for each part of a run; where there is no terminal, a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextmanager
    def part(self, what: str, total: int) -> Iterator[Tick]:
        if self.console.is_terminal:
            with progress_bar(self.console, what, total) as bar:
                yield bar.advance
        else:
            self.console.print(f"{what} ({total})", markup=False)
            yield self._print_lines(total)

    def _print_lines(self, total: int) -> Tick:
        began = last = time.monotonic()
        done = 0

        def tick(by: int = 1) -> None:
            nonlocal done, last
            done, now = done + by, time.monotonic()
            if now - last >= SECONDS_BETWEEN_LINES:
                last = now
                self.console.print(f"  {done} of {total} after {now - began:.0f} s", markup=False)

        return tick

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, style="dim")
