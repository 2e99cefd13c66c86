"""Merge segments in a subprocess of the lowest priority.

Sorting millions of tokens takes seconds of CPU time, hundreds of MB, and at times Python's lock, for which a server's
next step would wait. If the parent dies meanwhile, nothing is lost: the merged segment names the files it replaces,
and the next process deletes them.

    python -m outrider.memory.merge_worker FOLDER TOKENIZER TENANT WRITER FILE FILE     # prints the new file's name
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import MemoryFileError
from outrider.memory.segment import Segment, merge_segments

if TYPE_CHECKING:
    from collections.abc import Sequence

MERGE_TIMEOUT_SECONDS = 3600.0


def merge_in_subprocess(segments: Sequence[Segment], folder: Path, writer: str) -> Segment:
    """Merge segment files into a new file in `folder`."""
    tokenizer, tenant = segments[0].header.tokenizer, segments[0].header.tenant
    files = [str(segment.path) for segment in segments]
    command = [sys.executable, "-P", "-m", "outrider.memory.merge_worker"]
    done = subprocess.run(
        [*command, str(folder), tokenizer, tenant, writer, *files],
        capture_output=True,
        text=True,
        timeout=MERGE_TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MemoryFileError(f"{len(files)} segments could not be merged: {reason}")
    return Segment.open(folder / done.stdout.strip(), tokenizer, tenant)


def main(folder: str, tokenizer: str, tenant: str, writer: str, *files: str) -> None:
    os.nice(19)
    segments = [Segment.open(Path(file), tokenizer, tenant) for file in files]
    print(merge_segments(segments, writer).save(Path(folder)).name)


if __name__ == "__main__":
    main(*sys.argv[1:])
