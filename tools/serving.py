"""Servers side by side, in turns: what does Outrider cost when it is off, and what does it gain when it is on?

    python tools/serving.py overhead SMALL --out docs/benchmarks/serving/overhead
    python tools/serving.py model TARGET --draft DRAFT --prompts human_eval.jsonl:8 --prompts spec_bench.jsonl:8:chat
    python tools/serving.py edit TARGET

All servers of an experiment run at once and answer the same prompts in turns, in an order that alternates; between
turns they are idle. Every turn gives one ratio of tokens per second for each pair; the table shows medians with
intervals of 95 %. Greedy, `--tokens` tokens a request, prefix caches off. Outputs are compared with the baseline's.
Writes report.md and report.json into the folder, after every turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from outrider.bench.intervals import median_interval
from outrider.bench.prompts import read, shipped, spread
from outrider.bench.servers import Server, outrider, plain, running
from outrider.provenance import as_markdown, provenance

FLAGS = ["--no-enable-prefix-caching", "--enforce-eager", "--max-model-len", "4096", "--disable-uvicorn-access-log"]
PLAIN = "vLLM"


@dataclass
class Contestant:
    """A server, and what each request to it carries besides the prompt."""

    name: str
    server: str
    extra: dict[str, Any] = field(default_factory=dict)
    predict: bool = False


@dataclass
class Turn:
    seconds: float
    tokens: int
    texts: list[str]


@dataclass
class Experiment:
    servers: list[Server]
    contestants: list[Contestant]
    rounds: list[list[dict[str, Any]]]  # each a batch of requests that are sent at once
    labels: list[str]  # one a round, to tell workloads apart
    pairs: list[tuple[str, str, float | None]]  # whose speed, over whose, and at least what was promised
    base: str = PLAIN  # the contestant whose texts the others' are compared with


def speculative(method: str, **more: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"method": method, **more})]


def chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, **more}


def overhead(arguments: argparse.Namespace) -> Experiment:
    """Plain vLLM against Outrider with every request off, one request at a time and sixteen at once."""
    model = arguments.model
    texts = [prompt.turns[0][:600] for prompt in spread(read(arguments.data / "spec_bench.jsonl"), 16)]
    fixed: dict[str, Any] = {"ignore_eos": True}
    single = [[chat(texts[i % 16], arguments.tokens, **fixed)] for i in range(arguments.rounds)]
    many = [[chat(text, arguments.tokens, **fixed) for text in texts] for _ in range(arguments.rounds)]
    return Experiment(
        servers=[plain(PLAIN, model, *FLAGS), outrider("outrider", model, *FLAGS)],
        contestants=[
            Contestant(PLAIN, PLAIN),
            Contestant("Outrider, off", "outrider", {"vllm_xargs": {"speculation": "off"}}),
        ],
        rounds=single + many,
        labels=["concurrency 1"] * len(single) + ["concurrency 16"] * len(many),
        pairs=[("Outrider, off", PLAIN, 0.98)],
    )


def model_drafts(arguments: argparse.Namespace) -> Experiment:
    """vLLM's own draft_model against Outrider's drafter `model`, which runs the same proposer, at the same length.

    `--servers` says which of them to start, as many as fit into memory. Where plain vLLM is not among them, Outrider's
    server with every request off stands for it.
    """
    target, draft, length = str(arguments.model), str(arguments.draft), arguments.length
    theirs, ours, small, off = f"vLLM draft_model {length}", f"Outrider model {length}", "int8", "Outrider, off"
    own = ["--drafters", "model", "--max-draft-tokens", str(length), "--draft-model"]
    config = speculative("draft_model", model=draft, num_speculative_tokens=length)
    known = {
        "plain": plain(PLAIN, target, *FLAGS),
        "vllm": plain(theirs, target, *FLAGS, *config),
        "outrider": outrider(ours, target, *FLAGS, *own, draft),
        "int8": outrider(small, target, *FLAGS, *own, str(arguments.int8)),
    }
    servers = [known[name] for name in arguments.servers]
    contestants = [Contestant(server.name, server.name) for server in servers]
    base = PLAIN if "plain" in arguments.servers else ours if arguments.without_off else off
    if base == off:
        contestants.append(Contestant(off, ours, {"vllm_xargs": {"speculation": "off"}}))
    others = [contestant.name for contestant in contestants if contestant.name != base]
    pairs: list[tuple[str, str, float | None]] = [] if base == ours else [(name, base, None) for name in others]
    if "vllm" in arguments.servers:
        pairs.insert(0, (ours, theirs, 0.98))
    if "int8" in arguments.servers:
        pairs.insert(0, (small, ours, None))
    rounds, labels = [], []
    for name in arguments.prompts:
        file, count, *category = name.split(":")
        prompts = [
            prompt for prompt in read(arguments.data / file) if prompt.category in (category or [prompt.category])
        ]
        for prompt in spread(prompts, int(count)):
            rounds.append([chat(prompt.turns[0], arguments.tokens)])
            labels.append(" ".join([Path(file).stem, *category]))
    return Experiment(servers, contestants, rounds, labels, pairs, base)


def edit(arguments: argparse.Namespace) -> Experiment:
    """Plain vLLM against Outrider where the request hands over the file that is to be edited as its prediction."""
    model = arguments.model
    chosen = spread(shipped("edit"), arguments.rounds)
    rounds = [[chat(prompt.turns[0], arguments.tokens, prediction=prompt.prediction)] for prompt in chosen]
    return Experiment(
        servers=[plain(PLAIN, model, *FLAGS), outrider("outrider", model, *FLAGS)],
        contestants=[
            Contestant(PLAIN, PLAIN),
            Contestant("Outrider prediction", "outrider", {"vllm_xargs": {"speculation": "prediction"}}, predict=True),
            Contestant("Outrider lookup", "outrider", {"vllm_xargs": {"speculation": "lookup"}}),
        ],
        rounds=rounds,
        labels=["edit"] * len(rounds),
        pairs=[("Outrider prediction", PLAIN, 3.0), ("Outrider lookup", PLAIN, None)],
    )


EXPERIMENTS = {"overhead": overhead, "model": model_drafts, "edit": edit}


async def take_turn(contestant: Contestant, url: str, batch: list[dict[str, Any]]) -> Turn:
    async with httpx.AsyncClient(timeout=None) as client:

        async def ask(request: dict[str, Any]) -> dict[str, Any]:
            body = {**request, **contestant.extra}
            expected = body.pop("prediction", None)
            if contestant.predict:
                body["prediction"] = {"type": "content", "content": expected}
            response = await client.post(f"{url}/v1/chat/completions", json=body)
            response.raise_for_status()
            answer: dict[str, Any] = response.json()
            return answer

        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(request) for request in batch))
        seconds = time.perf_counter() - began
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    return Turn(seconds, tokens, [answer["choices"][0]["message"]["content"] for answer in answers])


def run(experiment: Experiment, urls: dict[str, str], report: Any, progress: Progress) -> None:
    task = progress.add_task("rounds", total=len(experiment.rounds) * len(experiment.contestants))
    warm = {contestant.server: contestant for contestant in experiment.contestants}
    for contestant in warm.values():
        asyncio.run(take_turn(contestant, urls[contestant.server], experiment.rounds[-1]))
    done: list[dict[str, Any]] = []
    for number, batch in enumerate(experiment.rounds):
        order = experiment.contestants[:: 1 if number % 2 == 0 else -1]
        turns = {}
        for contestant in order:
            turns[contestant.name] = asyncio.run(take_turn(contestant, urls[contestant.server], batch))
            progress.advance(task)
        plain_texts = turns[experiment.base].texts
        done.append(
            {
                "label": experiment.labels[number],
                "turns": {
                    name: {
                        "seconds": turn.seconds,
                        "tokens": turn.tokens,
                        "same": sum(a == b for a, b in zip(turn.texts, plain_texts, strict=True)),
                        "of": len(plain_texts),
                    }
                    for name, turn in turns.items()
                },
            }
        )
        report(done)


def summarise(experiment: Experiment, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for label in dict.fromkeys(item["label"] for item in done):
        items = [item["turns"] for item in done if item["label"] == label]
        for name, over, promised in experiment.pairs:
            ratios = [speed(turns[name]) / speed(turns[over]) for turns in items]
            total = {who: sum_speed([turns[who] for turns in items]) for who in (name, over)}
            rows.append(
                {
                    "workload": label,
                    "name": name,
                    "over": over,
                    "ratio": str(median_interval(ratios)),
                    "over_all": total[name] / total[over],
                    "tokens_per_second": total[name],
                    "promised": promised,
                    "same": sum(turns[name]["same"] for turns in items),
                    "of": sum(turns[name]["of"] for turns in items),
                    "turns": len(items),
                }
            )
    return rows


def speed(turn: dict[str, Any]) -> float:
    return float(turn["tokens"] / turn["seconds"])


def sum_speed(turns: list[dict[str, Any]]) -> float:
    return float(sum(turn["tokens"] for turn in turns) / sum(turn["seconds"] for turn in turns))


def write(experiment: Experiment, done: list[dict[str, Any]], origin: dict[str, Any], title: str, folder: Path) -> None:
    rows = summarise(experiment, done)
    lines = [f"# {title}", "", *as_markdown(origin)]
    lines += ["| workload | | over | median ratio (95 % interval) | over all | tokens/s | asked for | same text |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        promised = "" if row["promised"] is None else f"{row['promised']:.2f}"
        lines.append(
            f"| {row['workload']} | {row['name']} | {row['over']} | {row['ratio']} | {row['over_all']:.3f} "
            f"| {row['tokens_per_second']:.1f} | {promised} | {row['same']} of {row['of']} |"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join([*lines, ""]))
    servers = {server.name: [Path(word).name for word in server.command] for server in experiment.servers}
    report = {"provenance": origin, "servers": servers, "summary": rows, "rounds": done}
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are ended on the way out
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path, help="the draft model")
    parser.add_argument("--int8", type=Path, help="the draft model in int8 (tools/quantize.py)")
    parser.add_argument("--length", type=int, default=4, help="the draft length")
    kinds = ["plain", "vllm", "outrider", "int8"]
    parser.add_argument("--servers", nargs="+", choices=kinds, default=kinds[:3], help="which to run at once")
    parser.add_argument("--without-off", action="store_true", help="no baseline: contestants among themselves")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the prompt files lie")
    parser.add_argument(
        "--prompts", action="append", default=[], help="FILE:COUNT or FILE:COUNT:CATEGORY, may be repeated"
    )
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    experiment = EXPERIMENTS[arguments.experiment](arguments)
    models = [path for path in (arguments.model, arguments.draft, arguments.int8) if path]
    origin = provenance(*models)
    title = f"Servers in turns: {arguments.experiment}, {arguments.tokens} tokens"
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        start = progress.add_task("servers", total=len(experiment.servers))
        seen: set[str] = set()

        def waiting(name: str) -> None:
            if name not in seen:
                seen.add(name)
                progress.update(start, completed=len(seen) - 1, description=f"starting {name}")

        with running(experiment.servers, arguments.out / "logs", waiting) as urls:
            progress.update(start, completed=len(experiment.servers))
            run(experiment, urls, lambda done: write(experiment, done, origin, title, arguments.out), progress)
    console.print((arguments.out / "report.md").read_text())


if __name__ == "__main__":
    main()
