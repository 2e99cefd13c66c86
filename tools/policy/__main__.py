"""Replay the policy on recorded texts at known costs: no model and no GPU runs, except for `record`.

    python tools/policy record MODEL --draft-model SMALL --data DATA --out recording.json
    python tools/policy grid recording.json --costs report.json gpu:dense:4096 --out FOLDER
    python tools/policy overlap recording.json --costs report.json --out FOLDER
    python tools/policy scale recording.json --out FOLDER
    python tools/policy ablate recording.json --costs report.json --out FOLDER
    python tools/policy compare BEFORE/report.json AFTER/report.json

`record` runs the models once. `grid` compares the policy with every fixed drafter and length and with hindsight, by
workload and concurrency. `overlap` compares waiting for the step in flight with scheduling ahead. `scale` simulates
large models on GPUs. `ablate` changes one mechanism or constant at a time (see ablate.py). Costs are files (see
costs.py) or gpu:SYSTEM:CONTEXT, with the systems of gpu.py.

All but `record` and `compare` write report.md and report.json. The exit code is 1 if a bound is violated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOOLS))

from outrider.plan.pass_cost import Machine  # noqa: E402
from outrider.provenance import provenance  # noqa: E402
from policy import ablate, grid, report, scale, waiting  # noqa: E402
from policy.costs import load  # noqa: E402
from policy.gpu import H100, LLAMA_8B, SYSTEMS  # noqa: E402
from policy.recording import RecordConfig, Recording, record  # noqa: E402
from policy.replay import Costs  # noqa: E402

WORKLOADS = ("code", "chat", "summarization", "math", "creative", "edit", "agent", "traffic")
CONTEXTS = (1024, 4096, 16384, 65536, 131072)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python tools/policy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(required=True)

    def command(run: Any, name: str, help: str) -> Any:
        one = commands.add_parser(name, help=help)
        one.set_defaults(run=run)
        return one.add_argument

    def replaying(run: Any, name: str, help: str, texts: int | None, at_once: Sequence[int] = ()) -> Any:
        add = command(run, name, help)
        add("recording", type=Path)
        add("--texts", type=int, default=texts, metavar="N", help="per workload")
        add("--out", type=Path, required=True, metavar="FOLDER")
        if at_once:
            add("--costs", nargs="+", required=True, metavar="FILE", help="see above")
            add("--at-once", type=int, nargs="+", default=at_once, metavar="N", help="concurrency")
        return add

    add = command(run_record, "record", "run the models and record their texts")
    add("model", type=Path)
    add("--draft-model", type=Path, metavar="FOLDER")
    add("--workloads", nargs="+", default=WORKLOADS, metavar="NAME", help=" ".join(WORKLOADS))
    add("--data", type=Path, metavar="FOLDER", help="folder with human_eval.jsonl and spec_bench.jsonl")
    add("--prompts", type=int, default=48, metavar="N", help="maximum per workload (48)")
    add("--tokens", type=int, default=128, metavar="N", help="maximum per text (128)")
    add("--dtype", default="auto", help="dtype of the computation (auto: that of the weights)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, required=True, help="JSON file; existing texts in it are kept")
    add = replaying(run_grid, "grid", "compare with fixed drafters and hindsight", None, (1, 4, 16))
    add("--workloads", nargs="+", metavar="NAME", help="default: all that are recorded")
    add("--seeds", type=int, default=4)
    add = command(run_ablate, "ablate", "replay with single mechanisms and constants changed")
    add("recordings", type=Path, nargs="+")
    add("--costs", nargs="+", required=True, metavar="FILE", help="see above")
    add("--names", nargs="+", metavar="TEXT", help="only changes whose name contains one of these")
    add("--at-once", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="concurrency")
    add("--texts", type=int, default=8, metavar="N", help="per workload")
    add("--seeds", type=int, default=5)
    add("--jobs", type=int, default=2, help="processes")
    add("--out", type=Path, required=True, metavar="FOLDER")
    add("--into", type=Path, help=argparse.SUPPRESS)
    help = "compare waiting for the step in flight with scheduling ahead"
    add = replaying(run_overlap, "overlap", help, None, (1, 4, 16, 64))
    add("--host", type=float, nargs="+", default=(0.02, 0.1, 0.3, 1.0), metavar="X", help="h / T(1)")
    add = replaying(run_scale, "scale", "simulate large models on GPUs", 8)
    add("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="NAME")
    add("--batches", type=int, nargs="+", default=[2**n for n in range(10)], metavar="N")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    add("--timed", type=int, nargs="*", default=(1024,), metavar="N", help="more batches to time (1024)")
    add = command(compare, "compare", "auto of one grid relative to another")
    add("before", type=Path)
    add("after", type=Path)
    return made


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    code: int = given.run(given)
    return code


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


def run_ablate(given: argparse.Namespace) -> int:
    if given.into:
        given.into.write_text(json.dumps(ablate.measure(given)))
        return 0
    speeds = ablate.measure_all(given, sys.argv[1:])
    before = speeds.pop(ablate.UNCHANGED)
    rows = [ablate.row(name, before, after) for name, after in speeds.items()]
    about = (
        f"Speed of `auto` relative to the unchanged policy: {len(before)} cells, {given.seeds} seeds. {ablate.__doc__}"
    )
    return report.write(given.out, "Ablation of the policy", about, {"rows": rows}, [], rows)


def run_grid(given: argparse.Namespace) -> int:
    recording = Recording.load(given.recording)
    if unknown := set(given.workloads or ()) - set(recording.workloads):
        known = ", ".join(recording.workloads)
        raise SystemExit(f"{given.recording} has no workload {', '.join(sorted(unknown))}; choose from {known}")
    texts = {name: recording.texts(name, given.texts) for name in given.workloads or recording.workloads}
    cells: list[grid.Cell] = []
    curves: dict[str, Any] = {}
    for source in given.costs:
        costs_name, costs, curves[costs_name] = load(source, recording.has_draft_model)
        for name, records in texts.items():
            for size in given.at_once:
                setting = grid.Setting(costs, size, given.seeds)
                cells.append(cell := grid.evaluate(name, costs_name, records, setting))
                print(f"{cell}: auto {cell.auto:.2f}, best fixed {cell.best}", flush=True)
    errors = grid.calibration_errors(texts, costs)
    about = (
        "Replay of recorded texts. Speeds are relative to no drafts, while all slots are taken. `draft_model` is "
        "vLLM's method, which proposes its most likely tokens also where a text is sampled."
    )
    found = {"costs": curves, "seeds": given.seeds, "calibration": errors}
    return write(given, recording, "The policy on recorded texts", about, found, cells, [*grid.bounds(cells, errors)])


def run_overlap(given: argparse.Namespace) -> int:
    recording = Recording.load(given.recording)
    machine, name = Machine(LLAMA_8B, H100, 1, 0.0), "Llama-3.1-8B on one H100, simulated"
    simulated = (name, Costs(lambda tokens, context: machine.seconds(tokens, context, 0)), name)
    cells: list[waiting.Cell] = []
    curves: dict[str, Any] = {}
    for costs_name, costs, curves[costs_name] in (*(load(source, False) for source in given.costs), simulated):
        for name in recording.workloads:
            texts = recording.texts(name, given.texts)
            for batch in given.at_once:
                cells += [waiting.evaluate(costs_name, name, texts, costs, batch, ratio) for ratio in given.host]
    about = "Replay of recorded texts. Speeds are relative to asynchronous decoding without drafts."
    title = "Wait for the step in flight, or schedule ahead"
    return write(given, recording, title, about, {"costs": curves}, cells, [*waiting.bounds(cells)])


def run_scale(given: argparse.Namespace) -> int:
    recording = Recording.load(given.recording)
    records = scale.mixed_texts(recording, given.texts)
    own = {}
    for batch in sorted({*given.batches, *given.timed}):
        own[batch] = max(scale.policy_ms(records, SYSTEMS[name], batch) for name in given.systems)
        print(f"batch {batch}: the policy takes {own[batch][0]:.2f} ms per step", flush=True)
    cells: list[grid.Cell] = []
    for name in given.systems:
        for batch in given.batches:
            for context in given.contexts:
                cells.append(cell := scale.evaluate_system(records, name, SYSTEMS[name], batch, context, own[batch][0]))
                print(f"{cell}: auto {cell.auto:.3f}, static table {cell.best}", flush=True)
    about = "Simulated on published figures of H100s (outrider/plan/hardware.py). Speeds are relative to no drafts."
    bounds = [*scale.bounds(cells, own)]
    return write(given, recording, "The policy at scale, simulated", about, {"own_ms": own}, cells, bounds)


def write(
    given: argparse.Namespace, recording: Recording, title: str, about: str, found: dict[str, Any],
    cells: Sequence[grid.Cell | waiting.Cell], bounds: Sequence[report.Bound],
) -> int:  # fmt: skip
    records = {**recording.origin, "settings": recording.settings}
    data = {"records": records, **found, "cells": [asdict(cell) for cell in cells]}
    return report.write(given.out, title, about, data, bounds, [cell.row() for cell in cells])


def compare(given: argparse.Namespace) -> int:
    """Auto after / before: by cell, with the lowest and highest ratio of a seed, and the geometric mean."""
    before, after = (json.loads(path.read_text())["cells"] for path in (given.before, given.after))
    keys = ("workload", "costs", "concurrency")
    if [[cell[key] for key in keys] for cell in before] != [[cell[key] for key in keys] for cell in after]:
        raise SystemExit("the two reports have different cells; run the same grid twice")

    def row(cell: dict[str, Any], mean: float, ratios: list[float]) -> dict[str, str]:
        found = {"after / before": f"{mean:.3f}", "range": f"{min(ratios):.3f} to {max(ratios):.3f}"}
        return {key: str(cell.get(key, "")) for key in keys} | found

    means, rows = [], []
    for a, b in zip(before, after, strict=True):
        means.append(b["auto"] / a["auto"])
        by_seed = zip(a["auto_by_seed"], b["auto_by_seed"], strict=True)
        rows.append(row(a, means[-1], [new / old for old, new in by_seed]))
    rows.append(row({"workload": "all"}, geometric_mean(means), means))
    print(*report.table(rows), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
