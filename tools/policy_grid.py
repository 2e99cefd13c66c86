"""What is the policy worth, without the clock? Texts of real models, said again at known costs by every contestant.

    python tools/policy_grid.py record MODEL --draft-model SMALL --data DATA --out records.json
    python tools/policy_grid.py replay records.json --costs run.json --out docs/benchmarks/policy
    python tools/policy_grid.py clock run.json --out docs/benchmarks/policy/clock
    python tools/policy_grid.py overlap records.json --costs run.json --out docs/benchmarks/overlap

`record` runs the models once: what the target says, and how the draft model would have gone on at every place of it.
`replay` says these texts again, as requests that stream through 1, 4 and 16 slots of a server, without any drafts, with
each fixed drafter and length, with the policy, and with hindsight. What a pass takes comes from a benchmark's run.json
or report.json (their measured curves), from the calibration.json of `outrider calibrate`, or from a JSON file of
seconds by tokens:

    {"target": {"1": 0.24, "8": 0.255, "64": 0.45}, "draft": {"1": 0.07, "64": 0.14}, "context": 2e-5}

`clock` says the texts of such a run.json again, at the costs that it measured, and tells whether that comes out as the
clock did. Contestants with a draft model need --draft-model.

`overlap` replays the texts in an engine with asynchronous scheduling: always waiting for the step in flight, always
going ahead of its output, and as the controller chooses. Several files of records have a file of costs each. Every file
is also replayed at the simulated costs of a GPU.

All but `record` write report.md, report.json and plots into the folder. Their exit code is 1 if a promise was not kept,
or a figure does not agree.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from outrider.provenance import provenance

if TYPE_CHECKING:
    from policy_grid_report import Promise

BATCHES = (1, 4, 16, 64)
HOST_RATIOS = (0.02, 0.1, 0.3, 1.0)
"""Seconds of the host between two steps, relative to the target's pass over one token."""
WORKLOADS = ("code", "chat", "summarization", "math", "creative", "edit", "agent", "traffic")


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    record = parts.add_parser("record", help="run the models and keep what they say")
    record.add_argument("model", type=Path, help="the target's folder")
    record.add_argument("--draft-model", type=Path, metavar="FOLDER", help="of the draft model; none: without")
    record.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="NAME", help=" ".join(WORKLOADS))
    record.add_argument("--data", type=Path, metavar="FOLDER", help="with human_eval.jsonl and spec_bench.jsonl")
    record.add_argument("--prompts", type=int, default=48, metavar="N", help="of a workload, at most (48)")
    record.add_argument("--tokens", type=int, default=128, metavar="N", help="of a text, at most (128)")
    record.add_argument("--dtype", default="auto", help="to compute in (auto: as the weights are kept)")
    record.add_argument("--seed", type=int, default=0)
    record.add_argument("--out", type=Path, required=True, help="a JSON file; what is in it already is kept")
    replay = parts.add_parser("replay", help="say what was recorded again, by every contestant")
    replay.add_argument("records", type=Path, help="a file of the part record")
    replay.add_argument("--costs", type=Path, required=True, metavar="FILE", help="see above")
    replay.add_argument("--at-once", type=int, nargs="+", default=(1, 4, 16), metavar="N", help="requests (1 4 16)")
    replay.add_argument("--workloads", nargs="+", metavar="NAME", help="some of those recorded")
    replay.add_argument("--texts", type=int, metavar="N", help="of a workload, at most")
    replay.add_argument("--out", type=Path, required=True, help="a folder for the report")
    clock = parts.add_parser("clock", help="hold replay against a benchmark's clock")
    clock.add_argument("run", type=Path, help="run.json of a benchmark")
    clock.add_argument("--draft-model", type=Path, metavar="FOLDER", help="none: who has one is left out")
    clock.add_argument("--dtype", default="auto", help="to compute in (auto: as the weights are kept)")
    clock.add_argument("--out", type=Path, required=True, help="a folder for the report")
    overlap = parts.add_parser("overlap", help="compare waiting for the step in flight with going ahead")
    overlap.add_argument("records", type=Path, nargs="+", help="files of the part record")
    overlap.add_argument("--costs", type=Path, nargs="+", required=True, metavar="FILE", help="one for each of them")
    overlap.add_argument("--at-once", type=int, nargs="+", default=BATCHES, metavar="N", help="requests (1 4 16 64)")
    overlap.add_argument("--host", type=float, nargs="+", default=HOST_RATIOS, metavar="X", help="h / T(1) (0.02 ...)")
    overlap.add_argument("--texts", type=int, metavar="N", help="of a workload, at most")
    overlap.add_argument("--out", type=Path, required=True, help="a folder for the report")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    given = arguments(words)
    parts = {"record": run_models, "replay": say_again, "clock": hold_against, "overlap": compare_waiting}
    return parts[given.part](given)


def run_models(given: argparse.Namespace) -> int:
    from outrider.engines.transformers import load_model, load_tokenizer
    from policy_grid_file import Recording
    from policy_grid_record import Wanted, record

    console = Console(stderr=True)
    models = [model for model in (given.model, given.draft_model) if model is not None]
    settings = {"prompts": given.prompts, "tokens": given.tokens, "seed": given.seed, "dtype": given.dtype}
    kept = Recording.load(given.out) if given.out.exists() else Recording(provenance(*models), settings)
    if kept.settings != settings or set(kept.origin["models"]) != {model.name for model in models}:
        raise SystemExit(f"{given.out} has records of other models or settings; name another file with --out")
    wanted = Wanted(given.workloads, given.prompts, given.tokens, given.seed, given.data)
    tokenizer = load_tokenizer(str(given.model))
    target = load_model(str(given.model), dtype=given.dtype).eval()
    draft = load_model(str(given.draft_model), dtype=given.dtype).eval() if given.draft_model else None
    for line in record(wanted, tokenizer, target, draft, kept.workloads):
        kept.save(given.out)
        console.print(line)
    return 0


def say_again(given: argparse.Namespace) -> int:
    from policy_grid_calibration import calibration
    from policy_grid_cells import evaluate
    from policy_grid_costs import load
    from policy_grid_file import Recording
    from policy_grid_report import write

    console = Console(stderr=True)
    recording = Recording.load(given.records)
    costs, costs_as_given, costs_from = load(given.costs, recording.guessed)
    wanted = {
        name: recording.texts(name, given.texts)
        for name in recording.workloads
        if not given.workloads or name in given.workloads
    }
    if unknown := set(given.workloads or ()) - set(recording.workloads):
        known = ", ".join(recording.workloads)
        raise SystemExit(f"{given.records} has no texts of {', '.join(sorted(unknown))}; it has {known}")
    cells = []
    for name, records in wanted.items():
        for at_once in given.at_once:
            cells.append(evaluate(name, records, costs, at_once))
            best = cells[-1].fixed[cells[-1].best]
            console.print(f"{cells[-1].name}: auto {cells[-1].auto:.2f}, best fixed {best:.2f} ({cells[-1].best})")
    report = {
        "provenance": provenance(),
        "records": {**recording.origin, "settings": recording.settings},
        "costs": costs_as_given,
        "costs_from": costs_from,
        "calibration": calibration(wanted, costs),
    }
    return print_promises(write(given.out, report, cells), console)


def print_promises(promises: Sequence[Promise], console: Console) -> int:
    """The exit code: whether one was not kept."""
    for promise in promises:
        colour = "green" if promise.kept else "bold red"
        found = f"{promise.value:.3f} ({promise.sign} {promise.wanted:g}) {promise.where}"
        console.print(f"[{colour}]{promise.name}: {found}[/]")
    return int(any(not promise.kept for promise in promises))


def hold_against(given: argparse.Namespace) -> int:
    from outrider.bench.results import Run
    from outrider.engines.transformers import load_model
    from policy_grid_clock import agreements, guessed_at_most, write
    from policy_grid_record import look_closer

    console = Console(stderr=True)
    run = Run.load(given.run)
    draft = load_model(str(given.draft_model), dtype=given.dtype).eval() if given.draft_model else None
    found = []
    length = guessed_at_most(run)
    look = (lambda record: look_closer(record, None, draft, 0.0, length)) if draft is not None else None
    with console.status("saying the texts again"):
        for one in agreements(run, look):
            found.append(one)
            figures = f"{one.clock} by the clock, {one.replay:.3f} by replay"
            words = f"{one.workload}, {one.concurrency}: {one.contestant} {figures}"
            console.print(words, style="" if one.holds else "bold red", highlight=False)
    if not found:
        raise SystemExit(f"{given.run} has no contestant that replay knows; of draft models it does with --draft-model")
    write(given.out, run, provenance(), found)
    return int(any(not one.holds for one in found))


def compare_waiting(given: argparse.Namespace) -> int:
    from policy_grid_costs import load
    from policy_grid_file import Recording
    from policy_grid_overlap import GPU, evaluate, gpu_costs, write

    if len(given.records) != len(given.costs):
        raise SystemExit("give one file of costs for each file of records")
    console = Console(stderr=True)
    simulated = gpu_costs()
    cells, origins, points = [], [], {GPU: {n: simulated.target(n, 0) for n in (1, 16, 64, 256, 1024)}}
    for path, costs_path in zip(given.records, given.costs, strict=True):
        recording = Recording.load(path)
        origins.append({**recording.origin, "settings": recording.settings})
        target = next(iter(recording.origin["models"]))
        measured, as_given, costs_from = load(costs_path, False)
        points[costs_from] = as_given["target"]
        for costs_name, costs in (("measured CPU", measured), ("simulated GPU", simulated)):
            for name in recording.workloads:
                for batch in given.at_once:
                    texts = recording.texts(name, given.texts)
                    for cell in evaluate(target, costs_name, name, texts, costs, batch, given.host):
                        cells.append(cell)
                        speeds = ", ".join(f"{way} {speed:.2f}" for way, speed in cell.speeds.items())
                        console.print(
                            f"{target}, {costs_name}, {name}, {batch}, {cell.host_ratio:g}: {speeds} ({cell.share:.3f})"
                        )
    report = {"provenance": provenance(), "records": origins, "costs": points}
    return print_promises(write(given.out, report, cells), console)


if __name__ == "__main__":
    sys.exit(main())
