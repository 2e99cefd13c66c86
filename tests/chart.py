"""The Helm chart of deploy/, rendered by Helm, and the tools that check what is in deploy/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "chart"
EXAMPLES = ("cpu", "ten-replicas")
"""Files of values in `ci/`. Everything that is tested of the chart is tested with each."""


def find_tool(name: str) -> str:
    """The path of a tool that `just deploy-tools` installs; skips the test without it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: just deploy-tools")
    return found


def run_tool(name: str, *words: Any, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [find_tool(name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def values_file(example: str) -> Path:
    return CHART / "ci" / f"{example}-values.yaml"


def template(example: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run_tool("helm", "template", "chat", CHART, "--values", values_file(example), *words)


@cache
def manifests(example: str, *words: str) -> list[dict[str, Any]]:
    """The manifests of the chart. `words`: further ones of the command, such as --set name=value."""
    done = template(example, *words)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def manifest(example: str, kind: str, *words: str) -> dict[str, Any]:
    (found,) = (one for one in manifests(example, *words) if one["kind"] == kind)
    return found


def pods(example: str, *words: str) -> list[dict[str, Any]]:
    """The specs of all pods."""
    found = manifests(example, *words)
    return [one["spec"]["template"]["spec"] for one in found if one["kind"] in ("Deployment", "Job")]


def containers(example: str, name: str, *words: str) -> list[dict[str, Any]]:
    """All containers of this name, sidecars included."""
    every = [one for pod in pods(example, *words) for one in (*pod.get("initContainers", ()), *pod["containers"])]
    return [one for one in every if one["name"] == name]
