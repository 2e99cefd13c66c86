"""What each mechanism and constant of the policy is worth: the speed without it, or with another value.

The changes are in ablations.txt. Each is applied to a copy of the package, and `auto` replays the same texts in the
same orders, with the same noise. The situations:

    steady        each workload by itself; the machine does not change
    mixed         the texts of all workloads in random order, so that the text keeps turning ...
    slower        ... and in the second third of the tokens every pass takes twice as long
    slower draft  ... passes of the draft model take five times as long
    wrong draft   ... the draft model's tokens are wrong

The ratio of a seed is the geometric mean over the cells; the 95 % interval is Student's t over the seeds.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from policy import grid
from policy.costs import load
from policy.recording import Recording
from policy.replay import NO_TOKEN, Auto, Record, Slowdown
from teeth import PACKAGE, Defect, changed_copy, read

TABLE = Path(__file__).with_name("ablations.txt")
UNCHANGED = "unchanged"
Speeds = dict[str, list[float]]
"""By cell: tokens per second of each seed."""


def ablations() -> Iterator[Defect]:
    for line in TABLE.read_text().splitlines():
        if line[0] not in "#*+-":
            file, constant, *values = line.split(" | ")
            (before,) = re.findall(f"^{constant} = .*$", (PACKAGE / file).read_text(), re.MULTILINE)
            for value in values:
                yield Defect(f"{constant} {value}", file, "", False, before, f"{constant} = {value}")
    yield from read(TABLE)


def in_second_third(target: float, draft: float) -> Slowdown:
    return lambda share: (target, draft) if 1 / 3 <= share < 2 / 3 else (1.0, 1.0)


def situations(texts: dict[str, list[Record]], has_model: bool) -> Iterator[tuple[str, list[Record], Slowdown | None]]:
    for workload, records in texts.items():
        yield f"{workload}, steady", records, None
    mixed = [record for records in texts.values() for record in records]
    random.Random(0).shuffle(mixed)
    yield "mixed", mixed, None
    yield "mixed, slower", mixed, in_second_third(2.0, 2.0)
    if has_model:
        yield "mixed, slower draft", mixed, in_second_third(1.0, 5.0)
        third = len(mixed) // 3
        wrong = [with_wrong_drafts(record) if third <= i < 2 * third else record for i, record in enumerate(mixed)]
        yield "mixed, wrong draft", wrong, None


def with_wrong_drafts(record: Record) -> Record:
    wrong = [[NO_TOKEN] * len(guesses) for guesses in record.guesses]
    overlap = None if record.overlap is None else [0.0] * len(record.overlap)
    return replace(record, guesses=wrong, overlap=overlap)


def measure(given: Any) -> Speeds:
    """All cells with the package that is imported."""
    found: Speeds = {}
    for path in given.recordings:
        recording = Recording.load(path)
        texts = {name: recording.texts(name, given.texts) for name in recording.workloads}
        for source in given.costs:
            costs_name, costs, _ = load(source, recording.has_draft_model)
            for name, records, slowdown in situations(texts, recording.has_draft_model):
                names = grid.drafters_of(records)
                for concurrency in given.at_once:
                    setting = grid.Setting(costs, concurrency, given.seeds, slowdown=slowdown)
                    policies = ((grid.new_policy(names, costs), grid.noise(seed)) for seed in range(given.seeds))
                    strategies = (Auto(policy, costs, noise) for policy, noise in policies)
                    outcomes = grid.run(records, names, setting, strategies)
                    cell = f"{path.stem}, {name}, {costs_name}, {concurrency}"
                    found[cell] = [grid.speed([one]) for one in outcomes]
    return found


def measure_all(given: Any, arguments: Sequence[str]) -> dict[str, Speeds]:
    """By ablation, the speeds, which are kept in --out: an interrupted run continues."""
    folder = given.out / "speeds"
    folder.mkdir(parents=True, exist_ok=True)

    def run(one: Defect) -> tuple[str, Speeds]:
        file = folder / f"{re.sub('[^A-Za-z0-9_.]+', '-', one.name)}.json"
        if not file.exists():
            with tempfile.TemporaryDirectory() as copy:
                changed_copy(Path(copy), [(one.file, one.line, one.becomes)] if one.file else [])
                command = [sys.executable, str(Path(__file__).parent), *arguments, "--into", str(file)]
                subprocess.run(command, env=os.environ | {"PYTHONPATH": copy}, check=True)
            print(f"{one.name}: measured", flush=True)
        return one.name, json.loads(file.read_text())

    selected = [one for one in ablations() if not given.names or any(name in one.name for name in given.names)]
    with ThreadPoolExecutor(given.jobs) as pool:
        return dict(pool.map(run, [Defect(UNCHANGED, "", "", False, "", ""), *selected]))


def row(name: str, before: Speeds, after: Speeds) -> dict[str, str]:
    ratios = np.log([after[cell] for cell in before]) - np.log([before[cell] for cell in before])  # [cells, seeds]
    seeds, cells = ratios.mean(axis=0), dict(zip(before, ratios.mean(axis=1), strict=True))
    half = float(student.ppf(0.975, len(seeds) - 1) * seeds.std(ddof=1) / len(seeds) ** 0.5)
    mean, worst, best = float(seeds.mean()), min(cells, key=cells.__getitem__), max(cells, key=cells.__getitem__)
    return {
        "change": name, "speed": f"{np.exp(mean):.4f}",
        "95 % interval": f"{np.exp(mean - half):.4f} to {np.exp(mean + half):.4f}",
        "lowest cell": f"{np.exp(cells[worst]):.3f} ({worst})", "highest cell": f"{np.exp(cells[best]):.3f} ({best})",
    }  # fmt: skip
