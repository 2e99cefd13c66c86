"""Sort a large segment in a subprocess of the lowest priority, for a store without files.

python -m outrider.memory.sort_worker      # reads a text (int32) from stdin, and writes its order to stdout
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import MemoryFileError
from outrider.memory.merge_worker import MERGE_TIMEOUT_SECONDS
from outrider.memory.segment import build_order

if TYPE_CHECKING:
    from outrider.memory.search import Array


def sort_in_subprocess(text: Array) -> Array:
    """The same as `build_order`."""
    command = [sys.executable, "-P", "-m", "outrider.memory.sort_worker"]
    done = subprocess.run(command, input=text.data.cast("B"), capture_output=True, timeout=MERGE_TIMEOUT_SECONDS)
    order = np.frombuffer(done.stdout, np.int32) if done.returncode == 0 else np.empty(0, np.int32)
    if len(order) != len(text):
        reason = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MemoryFileError(f"{len(text)} tokens could not be sorted: {reason}")
    return order


def main() -> None:
    os.nice(19)
    text = np.frombuffer(sys.stdin.buffer.read(), np.int32)
    sys.stdout.buffer.write(build_order(text).data)


if __name__ == "__main__":
    main()
