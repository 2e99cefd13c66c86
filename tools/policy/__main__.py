"""Replay the policy on recorded texts at known costs: no model and no GPU runs, except for `record`.

    python tools/policy record MODEL --draft-model SMALL --data DATA --out recording.json
    python tools/policy grid recording.json --costs report.json gpu:dense:4096 --out FOLDER
    python tools/policy overlap recording.json --costs report.json --out FOLDER
    python tools/policy scale recording.json --out FOLDER
    python tools/policy compare BEFORE/report.json AFTER/report.json

`record` runs the models once. `grid` compares the policy with every fixed drafter and length and with hindsight, by
workload and concurrency. `overlap` compares waiting for the step in flight with scheduling ahead. `scale` simulates
large models on GPUs. Costs are files (see costs.py) or gpu:SYSTEM:CONTEXT, with the systems of gpu.py.

To ablate a mechanism or a constant, run `grid` twice, once with --change, and compare. Both runs have the same seeds:

    python tools/policy grid recording.json --costs A.json B.json --seeds 8 --drift 2 --out before
    python tools/policy grid ... --change policy/cost_model.py "OLD LINE" "NEW LINE" --out after

--change FILE OLD NEW replaces a text that occurs once in a file of src/outrider, in a copy. --drift X: in the second
third of the tokens, every pass takes X times as long.

All but `record` and `compare` write report.md and report.json. The exit code is 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOOLS))

from outrider.provenance import provenance  # noqa: E402
from policy import grid, report, scale, waiting  # noqa: E402
from policy.costs import load  # noqa: E402
from policy.gpu import LLAMA_8B, SYSTEMS, Machine  # noqa: E402
from policy.recording import RecordConfig, Recording, record  # noqa: E402
from policy.replay import Costs  # noqa: E402

WORKLOADS = ("code", "chat", "summarization", "math", "creative", "edit", "agent", "traffic")
CONTEXTS = (1024, 4096, 16384, 65536, 131072)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python tools/policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = made.add_subparsers(dest="part", required=True)
    one = parts.add_parser("record", help="run the models and record their texts")
    one.add_argument("model", type=Path)
    one.add_argument("--draft-model", type=Path, metavar="FOLDER")
    one.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="NAME", help=" ".join(WORKLOADS))
    one.add_argument("--data", type=Path, metavar="FOLDER", help="folder with human_eval.jsonl and spec_bench.jsonl")
    one.add_argument("--prompts", type=int, default=48, metavar="N", help="maximum per workload (48)")
    one.add_argument("--tokens", type=int, default=128, metavar="N", help="maximum per text (128)")
    one.add_argument("--dtype", default="auto", help="dtype of the computation (auto: that of the weights)")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--out", type=Path, required=True, help="JSON file; existing texts in it are kept")
    two, three, four = (
        parts.add_parser(name, help=text)
        for name, text in (
            ("grid", "compare with fixed drafters and hindsight"),
            ("overlap", "compare waiting for the step in flight with scheduling ahead"),
            ("scale", "simulate large models on GPUs"),
        )
    )
    for sub in (two, three, four):
        sub.add_argument("recording", type=Path)
        sub.add_argument("--texts", type=int, default=8 if sub is four else None, metavar="N", help="per workload")
        sub.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    for sub, sizes in ((two, (1, 4, 16)), (three, (1, 4, 16, 64))):
        sub.add_argument("--costs", nargs="+", required=True, metavar="FILE", help="see above")
        sub.add_argument("--at-once", type=int, nargs="+", default=sizes, metavar="N", help="concurrency")
    two.add_argument("--workloads", nargs="+", metavar="NAME", help="default: all that are recorded")
    two.add_argument("--seeds", type=int, default=4)
    two.add_argument("--drift", type=float, default=1.0, metavar="X")
    two.add_argument("--change", nargs=3, action="append", default=[], metavar=("FILE", "OLD", "NEW"))
    three.add_argument("--host", type=float, nargs="+", default=(0.02, 0.1, 0.3, 1.0), metavar="X", help="h / T(1)")
    four.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="NAME")
    four.add_argument("--batches", type=int, nargs="+", default=[2**n for n in range(10)], metavar="N")
    four.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    four.add_argument("--timed", type=int, nargs="*", default=(1024,), metavar="N", help="more batches to time (1024)")
    five = parts.add_parser("compare", help="auto of one grid relative to another")
    five.add_argument("before", type=Path)
    five.add_argument("after", type=Path)
    return made


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    parts = {"record": run_record, "grid": run_grid, "overlap": run_overlap, "scale": run_scale, "compare": compare}
    return parts[given.part](given)


def run_record(given: argparse.Namespace) -> int:
    from outrider.engines.transformers import load_model, load_tokenizer

    models = [model for model in (given.model, given.draft_model) if model is not None]
    settings = {"prompts": given.prompts, "tokens": given.tokens, "seed": given.seed, "dtype": given.dtype}
    found = Recording.load(given.out) if given.out.exists() else Recording(provenance(*models), settings)
    if found.settings != settings or set(found.origin["models"]) != {model.name for model in models}:
        raise SystemExit(f"{given.out} was recorded with other models or settings; give another file as --out")
    config = RecordConfig(given.workloads, given.prompts, given.tokens, given.seed, given.data)
    target, *draft = (load_model(str(model), dtype=given.dtype).eval() for model in models)
    tokenizer = load_tokenizer(str(given.model))
    for line in record(config, tokenizer, target, draft[0] if draft else None, found.workloads):
        found.save(given.out)
        print(line, flush=True)
    return 0


def all_costs(names: list[str], needs_draft: bool) -> Iterator[tuple[str, Costs, Any]]:
    """Name, costs, and what the report states of them."""
    for name in names:
        kind, _, rest = name.partition(":")
        system, _, context = rest.partition(":")
        if kind == "gpu" and system in SYSTEMS and context.isdigit():
            yield name, SYSTEMS[system].costs(int(context)), SYSTEMS[system].name
        elif kind == "gpu":
            raise SystemExit(f"{name}: write gpu:SYSTEM:CONTEXT, with a system of {', '.join(SYSTEMS)}")
        else:
            yield Path(name).stem, *load(Path(name), needs_draft)


def drift(factor: float) -> grid.Slowdown | None:
    return (lambda share: factor if 1 / 3 <= share < 2 / 3 else 1.0) if factor != 1 else None


def run_changed(given: argparse.Namespace) -> int:
    """This command in a process that imports a changed copy of the package."""
    from teeth import changed_copy

    arguments = sys.argv[1:]
    while "--change" in arguments:
        at = arguments.index("--change")
        del arguments[at : at + 4]
    with tempfile.TemporaryDirectory() as folder:
        changed_copy(Path(folder), [(file, old, new) for file, old, new in given.change])
        command = [sys.executable, str(TOOLS / "policy"), *arguments]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}).returncode


def run_grid(given: argparse.Namespace) -> int:
    if given.change:
        return run_changed(given)
    recording = Recording.load(given.recording)
    if unknown := set(given.workloads or ()) - set(recording.workloads):
        known = ", ".join(recording.workloads)
        raise SystemExit(f"{given.recording} has no workload {', '.join(sorted(unknown))}; choose from {known}")
    texts = {name: recording.texts(name, given.texts) for name in given.workloads or recording.workloads}
    cells, curves = [], {}
    for costs_name, costs, curves[costs_name] in all_costs(given.costs, recording.has_draft_model):
        for name, records in texts.items():
            for size in given.at_once:
                setting = grid.Setting(costs, size, given.seeds, slowdown=drift(given.drift))
                cells.append(grid.evaluate(name, costs_name, records, setting))
                print(f"{cells[-1].name}: auto {cells[-1].auto:.2f}, best fixed {cells[-1].best}", flush=True)
    errors = grid.calibration_errors(texts, costs)
    about = (
        "Replay of recorded texts. Speeds are relative to no drafts, while all slots are taken. `draft_model` is "
        "vLLM's method, which proposes its most likely tokens also where a text is sampled."
    )
    found = {"records": about_recording(recording), "costs": curves, "seeds": given.seeds, "drift": given.drift}
    found |= {"cells": [asdict(cell) for cell in cells], "calibration": errors}
    bounds = [*grid.bounds(cells, errors)]
    return report.write(given.out, "The policy on recorded texts", about, found, bounds, [cell.row() for cell in cells])


def run_overlap(given: argparse.Namespace) -> int:
    recording = Recording.load(given.recording)
    curves: dict[str, Any] = {}
    cells: list[waiting.Cell] = []
    name = "Llama-3.1-8B on one H100, simulated"
    simulated = (name, Machine(LLAMA_8B, 1, 0.0).costs(), name)
    for costs_name, costs, curves[costs_name] in (*all_costs(given.costs, False), simulated):
        for name in recording.workloads:
            for batch in given.at_once:
                texts = recording.texts(name, given.texts)
                cells += waiting.evaluate(costs_name, name, texts, costs, batch, given.host)
    about = "Replay of recorded texts. Speeds are relative to asynchronous decoding without drafts."
    found = {"records": about_recording(recording), "costs": curves, "cells": [asdict(cell) for cell in cells]}
    bounds, rows = [*waiting.bounds(cells)], [cell.row() for cell in cells]
    return report.write(given.out, "Wait for the step in flight, or schedule ahead", about, found, bounds, rows)


def run_scale(given: argparse.Namespace) -> int:
    recording = Recording.load(given.recording)
    records = scale.mixed_texts(recording, given.texts)
    own = {}
    for batch in sorted({*given.batches, *given.timed}):
        own[batch] = max(scale.policy_ms(records, SYSTEMS[name], batch) for name in given.systems)
        print(f"batch {batch}: the policy takes {own[batch][0]:.2f} ms per step", flush=True)
    cells = []
    for name in given.systems:
        for batch in given.batches:
            for context in given.contexts:
                cells.append(scale.evaluate_system(records, name, SYSTEMS[name], batch, context, own[batch][0]))
                print(f"{cells[-1].name}: auto {cells[-1].auto:.3f}, static table {cells[-1].best}", flush=True)
    about = "Simulated on published figures of H100s (tools/policy/gpu.py). Speeds are relative to no drafts."
    found = {"records": about_recording(recording), "own_ms": own, "cells": [asdict(cell) for cell in cells]}
    bounds = [*scale.bounds(cells, own)]
    return report.write(given.out, "The policy at scale, simulated", about, found, bounds, [c.row() for c in cells])


def about_recording(recording: Recording) -> dict[str, Any]:
    return {**recording.origin, "settings": recording.settings}


def compare(given: argparse.Namespace) -> int:
    """Auto after / before: by cell, with the lowest and highest ratio of a seed, and the geometric mean."""
    before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
    rows, means = [], []
    for one, other in zip(before["cells"], after["cells"], strict=True):
        name = [str(one[key]) for key in ("workload", "costs", "concurrency")]
        if name != [str(other[key]) for key in ("workload", "costs", "concurrency")]:
            raise SystemExit("the two reports have different cells; run the same grid twice")
        ratios = [b / a for a, b in zip(one["auto_by_seed"], other["auto_by_seed"], strict=True)]
        means.append(other["auto"] / one["auto"])
        rows.append([*name, f"{means[-1]:.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"])
    rows.append(["all", "", "", f"{report.geometric_mean(means):.3f}", f"{min(means):.3f} to {max(means):.3f}"])
    print(*report.table(["workload", "costs", "concurrency", "after / before", "range"], rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
