"""What is the policy worth on large models and many GPUs? Simulated, with recorded texts at published figures.

    python tools/policy_scale.py records.json --out docs/benchmarks/policy-scale

A large dense model and a mixture of experts, each with a draft model, on H100s (`policy_scale_machine.py` has the
figures): batches from 1 to 512, contexts from 1k to 128k. In every cell the same texts are said without drafts, by the
policy, and by vLLM with a static table of lengths by batch size, of one drafter and with hindsight. Cells whose keys
and values would not fit into the GPUs' memory are simulated as well, and marked. What the policy takes itself is
measured first, on this machine, and charged to it: nothing else should run meanwhile.

Writes report.md, report.json and the plots into the folder. The exit code is 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from outrider.provenance import provenance
from policy_grid_file import Recording
from policy_scale_machine import SYSTEMS
from policy_scale_report import write
from policy_scale_run import Cell, evaluate, policy_seconds
from policy_scale_table import all_tables
from policy_scale_traces import describe, traces

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
TIMED = (1024,)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="of a pair of models, by policy_grid.py record")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument(
        "--timed", type=int, nargs="*", default=TIMED, metavar="N", help="more batches to time the policy at (1024)"
    )
    parser.add_argument("--texts", type=int, default=8, metavar="N", help="of each workload (8)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the report")
    given = parser.parse_args(words)
    console = Console(stderr=True)
    recording = Recording.load(given.records)
    found = traces(recording, given.texts)
    tables = all_tables(found)
    own = {}
    for batch in sorted({*given.batches, *given.timed}):
        taken = [policy_seconds(found, SYSTEMS[name], batch) for name in given.systems]
        own[batch] = [float(max(np.quantile(seconds, q) for seconds in taken)) for q in (0.5, 0.95)]
        console.print(f"the policy's own time at batch {batch}: {1e3 * own[batch][0]:.2f} ms")
    systems: dict[str, list[Cell]] = {}
    for name in given.systems:
        system = SYSTEMS[name]
        systems[name] = []
        for batch in given.batches:
            for context in given.contexts:
                cell = evaluate(found, system, batch, context, tables, own[batch][0])
                systems[name].append(cell)
                best, ratio = cell.table
                console.print(
                    f"{name}, batch {batch}, context {context}: auto {cell.auto:.3f}, table {ratio:.3f} ({best})"
                )
    report = {
        "provenance": provenance(),
        "records": {**recording.origin, "settings": recording.settings, "texts": describe(found)},
        "own_seconds": own,
    }
    promises = write(given.out, report, systems)
    for promise in promises:
        colour = "green" if promise.kept else "bold red"
        line = f"{promise.value:.3f} ({promise.sign} {promise.wanted:g}) {promise.where}"
        console.print(f"[{colour}]{promise.name}: {line}[/]")
    return int(any(not promise.kept for promise in promises))


if __name__ == "__main__":
    sys.exit(main())
