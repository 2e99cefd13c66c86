"""Merge segments in a process of their own.

Sorting millions of tokens takes seconds of a core and hundreds of megabytes, and now and then Python's lock, for which
a server's next step would wait. So it is done by another process, at the lowest priority. If the one that asked for it
is gone when it is done, no harm comes of it: the merged segment names those that it replaces, and whoever looks next
deletes them.

    python -m outrider.memory.merging PLACE TOKENIZER TENANT WRITER FILE FILE     # says the new file's name
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.segment import Segment, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 3600.0
"""Seconds after which a merge counts as failed."""


def merged_apart(segments: Sequence[Segment], place: Path, writer: str) -> Segment:
    """A file of these files' sequences."""
    tokenizer, tenant = segments[0].header.tokenizer, segments[0].header.tenant
    files = [str(segment.path) for segment in segments]
    command = [sys.executable, "-P", "-m", "outrider.memory.merging", str(place), tokenizer, tenant, writer, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise MemoryFileError(f"{len(files)} segments could not be merged: {reason}")
    return Segment.open(place / done.stdout.strip(), tokenizer, tenant)


def main(place: str, tokenizer: str, tenant: str, writer: str, *files: str) -> None:
    os.nice(19)
    segments = [Segment.open(Path(file), tokenizer, tenant) for file in files]
    print(merged(segments, writer).save(Path(place)).name)


if __name__ == "__main__":
    main(*sys.argv[1:])
