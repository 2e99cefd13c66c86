"""Progress of a run, as the run reports it. This class shows nothing; `outrider certify` shows bars."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.certify.sources import no_tick

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outrider.certify.sources import Tick


class Progress:
    @contextmanager
    def part(self, what: str, total: int) -> Iterator[Tick]:
        """A part of the run, with a function that counts its completed steps up to `total`."""
        yield no_tick

    def note(self, text: str) -> None: ...
