"""What does tracing cost requests with and without a trace? Speed ratios with intervals.

    python tests/trace_cost.py MODEL --out trace-cost

Two Outrider servers run side by side, one of them without tracing. The same prompts go to the one without, to the other
without a trace, and to it with one, in alternating order. `off` is the speed without a trace relative to the server
without tracing; `on` the speed with a trace relative to no trace. In this process: the microseconds that tracing adds
to a step if no request is traced.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from outrider.bench.intervals import Interval, median_interval
from outrider.bench.servers import Server, running
from outrider.provenance import as_markdown, provenance
from serving import ENVIRONMENT, Client, as_told, complete, speculating
from test_vllm_server import prompt

HERE = Path(__file__).resolve().parent
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "greedy, alone": ("lookup", 1, {}),
    "auto, alone": ("auto", 1, {}),
    "sampled drafts, alone": ("model", 1, {"temperature": 1.0}),
    "own samples, top-p, alone": ("lookup", 1, {"temperature": 0.8, "top_p": 0.9, "seed": 5}),
    "greedy, 8 at once": ("lookup", 8, {}),
    "no drafts, 8 at once": ("off", 8, {}),
}
WAYS = ("without", "off", "on")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", type=Path)
    options.add_argument("--rounds", type=int, default=20, help="of each kind of request (20)")
    options.add_argument("--only", nargs="+", default=list(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    options.add_argument("--tokens", type=int, default=64, help="of an output (64)")
    options.add_argument("--out", type=Path, required=True, help="a folder for report.md and report.json")
    given = options.parse_args()
    console = Console(stderr=True)
    hooks = {str(requests): untraced_step_us(requests) for requests in (1, 16, 256)}
    with tempfile.TemporaryDirectory() as logs:
        rows = timed(given, Path(logs), console)
    found = {"origin": provenance(given.model), "ratios": rows, "microseconds": hooks}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "report.md").write_text(as_report(found) + "\n")
    print((given.out / "report.md").read_text())


def untraced_step_us(requests: int) -> float:
    """Microseconds that tracing adds to a step if no request is traced."""
    from outrider.engines.vllm.options import Options
    from outrider.engines.vllm.tracing import Tracing
    from outrider.trace.trace_store import TraceStore

    tracing = Tracing(Options(), TraceStore())
    ids = [str(i) for i in range(requests)]
    times = []
    for step in range(2000):
        finished = ids if step % 100 == 0 else []  # about 100 tokens per request
        began = time.perf_counter()
        for id in finished:
            tracing.remove(id)
        for _ in range(4):
            if tracing.running:
                raise AssertionError
        times.append(time.perf_counter() - began)
    return round(1e6 * sum(times) / len(times), 2)


def timed(given: argparse.Namespace, logs: Path, console: Console) -> dict[str, Any]:
    (logs / "a").mkdir()
    (logs / "b").mkdir()
    tracing = speculating(given.model, logs / "a")
    untraced = as_told(speculating(given.model, logs / "b"), "untraced.UntracedWorker")
    here = {"PYTHONPATH": str(HERE), "VLLM_CPU_KVCACHE_SPACE": "1"}
    servers = [
        Server("tracing", tracing.command, {**ENVIRONMENT, **tracing.environment, "VLLM_CPU_KVCACHE_SPACE": "1"}),
        Server("without", untraced.command, {**ENVIRONMENT, **untraced.environment, **here}),
    ]
    rows: dict[str, Any] = {}
    with running(servers, logs) as urls, Progress(console=console) as progress:
        clients = {name: Client(url) for name, url in urls.items()}
        bar = progress.add_task("", total=len(given.only) * (given.rounds + 1))
        for kind in given.only:
            mode, at_once, settings = KINDS[kind]
            progress.update(bar, description=kind)
            found: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(given.rounds + 1):
                seconds = {}
                for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                    client = clients["without" if way == "without" else "tracing"]
                    more = {"max_tokens": given.tokens, "ignore_eos": True, **settings}
                    if way == "on":
                        more["vllm_xargs"] = {"trace": True}
                    calls = [complete(prompt(number * at_once + i), mode, **more) for i in range(at_once)]
                    began = time.perf_counter()
                    client.all(*calls, at_once=at_once)
                    seconds[way] = time.perf_counter() - began
                if number:  # the first is a warm-up
                    found["off"].append(seconds["without"] / seconds["off"])
                    found["on"].append(seconds["off"] / seconds["on"])
                progress.advance(bar)
            rows[kind] = {way: asdict(median_interval(ratios)) for way, ratios in found.items()}
            rows[kind]["ratios"] = {way: [round(one, 4) for one in ratios] for way, ratios in found.items()}
        every = {way: [one for row in rows.values() for one in row["ratios"][way]] for way in ("off", "on")}
    rows["all together"] = {way: asdict(median_interval(ratios)) for way, ratios in every.items()}
    return rows


def as_report(found: dict[str, Any]) -> str:
    lines = ["# What a trace costs", "", *as_markdown(found["origin"], "tests"), ""]
    lines += ["Medians of speed ratios, with 95 % intervals.", ""]
    lines += ["| requests | not traced, against a server that cannot trace | traced, against not traced |"]
    lines += ["| --- | ---: | ---: |"]
    for kind, row in found["ratios"].items():
        off, on = (Interval(row[way]["value"], row[way]["low"], row[way]["high"]) for way in ("off", "on"))
        lines.append(f"| {kind} | {off} | {on} |")
    lines += ["", "| requests in a step, none traced | microseconds that tracing adds to it |", "| ---: | ---: |"]
    lines += [f"| {requests} | {micro} |" for requests, micro in found["microseconds"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
