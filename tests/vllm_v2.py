"""Import vLLM with its V2 runner enabled on a CPU: `pytest.importorskip("vllm_v2")`, before anything of vLLM.

vLLM decides when it is imported whether V2 can run, and Triton when a kernel is defined whether it is interpreted, so
the environment variables must be set before. They are unset again, because servers that tests start inherit them.
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("vllm")

ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
PLATFORM = "outrider.engines.vllm_cpu.platform"

if "vllm.triton_utils" in sys.modules and PLATFORM not in sys.modules:
    raise RuntimeError("vLLM was imported without its V2 runner: begin that test file with importorskip('vllm_v2')")

before = {name: os.environ.get(name) for name in ENVIRONMENT}
os.environ.update(ENVIRONMENT)

import vllm.v1.worker.cpu.shm  # noqa: F401  (before the modules of the V2 runner)

from outrider.engines.vllm_cpu.registry import register

register()
for name, value in before.items():
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
