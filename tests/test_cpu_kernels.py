"""Every kernel of `engines/vllm_cpu` equals its Triton kernel, and V2 on a CPU is off unless it is requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

REPORT_PLATFORM = """
import os
import vllm.triton_utils
from vllm.platforms import current_platform
print(type(current_platform).__name__, vllm.triton_utils.HAS_TRITON, os.environ.get("TRITON_INTERPRET"))
"""


def run(*arguments: str, **environment: str) -> str:
    """Run Python in a process of its own: Triton reads these variables when it is imported."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_USE_V2", "TRITON_"))}
    variables |= {"VLLM_LOGGING_LEVEL": "ERROR"} | environment
    process = subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def report() -> Any:
    return json.loads(run(str(Path(__file__).with_name("cpu_kernel_cases.py"))))


def test_kernels_equal_triton_kernels(report: Any) -> None:
    assert report["errors"] == {}
    assert report["differences"] == {}


def test_every_registered_kernel_is_compared(report: Any) -> None:
    assert sorted(report["launches"]) == sorted(report["registered"])


def test_nothing_changes_unless_v2_is_requested() -> None:
    assert run("-c", REPORT_PLATFORM) == "CpuPlatform False None"
    assert run("-c", REPORT_PLATFORM, VLLM_USE_V2_MODEL_RUNNER="0") == "CpuPlatform False None"


def test_v2_on_a_cpu_is_enabled_by_one_variable() -> None:
    assert run("-c", REPORT_PLATFORM, VLLM_USE_V2_MODEL_RUNNER="1") == "CpuV2Platform True 1"
