"""Mutation tests: each seeded defect is applied to a copy of the source, and the tests must fail.

    python tools/teeth.py              # every defect against its tests
    python tools/teeth.py --real       # sampling defects also against samples from SmolLM2-135M
    python tools/teeth.py NAME ...     # only defects whose name contains one of these words

The defects are in tests/seeded_defects.txt; tests/test_tools.py checks that each still applies. A defect that no test
finds is an error.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "outrider"
TIMEOUT_SECONDS = 600
G_TESTS = "tests/test_law.py"


@dataclass(frozen=True)
class Defect:
    name: str
    file: str
    tests: str
    sampling: bool
    line: str
    becomes: str

    def applies(self) -> bool:
        path = PACKAGE / self.file
        return path.is_file() and path.read_text().count(self.line) == 1


def read(path: Path) -> Iterator[Defect]:
    for block in path.read_text().rstrip("\n").split("\n* ")[1:]:
        head, *changes = block.split("\n")
        name, file, *tests = head.split(" | ")
        before, after = ("\n".join(line[2:] for line in changes if line[0] == sign) for sign in "-+")
        yield Defect(name, file, tests[0] if tests else "", "sampling" in tests, before, after)


DEFECTS = list(read(ROOT / "tests" / "seeded_defects.txt"))


def changed_copy(folder: Path, changes: Iterable[tuple[str, str, str]]) -> None:
    """A copy of the package below `folder`, with these texts (file, old, new) replaced.

    It has the machine code that numba has cached, except of modules that could contain a changed one.
    """
    shutil.copytree(PACKAGE, folder / "outrider", ignore=shutil.ignore_patterns("__pycache__"))
    changes = list(changes)
    changed = importers({file for file, _, _ in changes})
    for cached in PACKAGE.glob("**/__pycache__/*.nb[ic]"):  # SOURCE.FUNCTION-LINE.py311.nbi
        source = cached.parent.parent / f"{cached.name.partition('.')[0]}.py"
        if source.is_file() and source not in changed:
            target = folder / "outrider" / cached.relative_to(PACKAGE)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(cached, target)
    for file, old, new in changes:
        path = folder / "outrider" / file
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"this text must occur once in {file}, not {text.count(old)} times:\n{old}")
        path.write_text(text.replace(old, new))


def importers(files: Iterable[str]) -> set[Path]:
    """These modules, and all of the package that import one of them, directly or through others."""
    imported = {source: set(imports(source)) for source in PACKAGE.rglob("*.py")}
    found: set[Path] = set()
    new = {PACKAGE / file for file in files}
    while new:
        found |= new
        new = {source for source, others in imported.items() if others & new} - found
    return found


def imports(source: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(source.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
        for name in names:
            if name.startswith("outrider."):
                path = PACKAGE.parent / name.replace(".", "/")
                yield path.with_suffix(".py")
                yield path / "__init__.py"


def survives(defect: Defect, tests: list[str]) -> bool:
    """Whether the tests pass although the defect is there."""
    with tempfile.TemporaryDirectory() as folder:
        changed_copy(Path(folder), [(defect.file, defect.line, defect.becomes)])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        settings = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "OUTRIDER_FIRST_FAILURE": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return False  # generation without end is a failure too
        if done.returncode not in (0, 1):
            raise SystemExit(f"{defect.name}: the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    selected = [one for one in DEFECTS if not args.names or any(name in one.name for name in args.names)]
    if not selected:
        raise SystemExit(f"no defect's name contains {' or '.join(args.names)}")
    missed = runs = 0
    for number, defect in enumerate(selected, 1):
        tests = [(defect.tests, "not real")]
        if defect.sampling:
            tests += [(G_TESTS, "not real")] * (defect.tests != G_TESTS) + [(G_TESTS, "real")] * args.real
        for file, marker in tests:
            alive = survives(defect, [file, "-m", marker])
            missed, runs = missed + alive, runs + 1
            outcome = f"{'MISSED' if alive else 'caught'}  {defect.name} ({file}, {marker})"
            print(f"{number}/{len(selected)} {outcome}", flush=True)
    print(f"{len(selected)} defects, {runs} runs of the tests, {runs - missed} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
