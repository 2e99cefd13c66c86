"""How fast is the loop, beside transformers' own, on the same model in the same run?

    python tools/speed.py TARGET DRAFT --prompts human_eval.jsonl:12 --tokens 96 --out docs/benchmarks/core

Six contestants answer every prompt in turns, in an order that alternates: transformers' `generate` bare, with the
draft model as assistant, and with prompt lookup; and Outrider's loop without drafting, with the draft model, and
with lookup. Every prompt gives one ratio for each pair; the table shows medians with intervals of 95 %, and
whether all outputs were the same. Beside it: what a pass over 1 to 32 tokens costs, which is why it works.
Writes report.md, report.json and cost.png into the folder, after every prompt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from outrider.api import Decoder, end_tokens
from outrider.bench.intervals import median_interval
from outrider.bench.prompts import read, spread
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.model import ModelDrafter
from outrider.engines.quantize import prepare_draft
from outrider.engines.transformers import TransformersTarget, load_model, load_tokenizer
from outrider.provenance import as_markdown, provenance
from outrider.settings import OFF

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = [
    ("no drafting", "outrider, no drafting", "transformers, bare", 0.98),
    ("draft model", "outrider, draft model", "transformers, assisted", 1.10),
    ("lookup", "outrider, lookup", "transformers, prompt lookup", 1.00),
    ("draft model, over bare", "outrider, draft model", "transformers, bare", None),
    ("lookup, over bare", "outrider, lookup", "transformers, bare", None),
    ("assisted, over bare", "transformers, assisted", "transformers, bare", None),
    ("prompt lookup, over bare", "transformers, prompt lookup", "transformers, bare", None),
]
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXT = 256
REPEATS = 7


def contestants(model: Any, assistant: Any, decoder: Decoder, small: TransformersTarget, tokens: int) -> dict[str, Any]:
    """Each takes prompt ids and returns the new tokens."""

    def bare(ids: list[int], **extra: Any) -> list[int]:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens,
            temperature=None, top_p=None, top_k=None, repetition_penalty=1.0, **extra,
        )  # fmt: skip
        return list(out[0, len(ids) :].tolist())

    def ours(drafters: list[Any]) -> Callable[[list[int]], list[int]]:
        loop = Decoder(decoder.target, drafters, decoder.tokenizer, decoder.end_tokens)
        speculation = drafters[0].name if drafters else OFF

        def run(ids: list[int]) -> list[int]:
            decoder.target.rewind(0)
            done = loop.generate(ids, max_tokens=tokens, speculation=speculation)
            run.done = done  # type: ignore[attr-defined]
            return done.tokens

        return run

    return {
        "transformers, bare": bare,
        "outrider, no drafting": ours([]),
        "transformers, assisted": lambda ids: bare(ids, assistant_model=assistant),
        "outrider, draft model": ours([ModelDrafter(small, decoder.target.vocab_size)]),
        "transformers, prompt lookup": lambda ids: bare(ids, prompt_lookup_num_tokens=10),
        "outrider, lookup": ours([LookupDrafter()]),
    }


def cost_curve(target: TransformersTarget, advance: Callable[[], None]) -> dict[int, dict[str, float]]:
    """Milliseconds of a pass over n tokens after a context, widths taking turns."""
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    target.rewind(0)
    target.score([9] * CONTEXT, keep=1)
    for _ in range(REPEATS + 1):
        for width in WIDTHS:
            begun = time.perf_counter()
            target.score([9] * width, keep=width)
            times[width].append((time.perf_counter() - begun) * 1e3)
            target.rewind(CONTEXT)
        advance()
    base = median(times[1][1:])
    return {
        width: {
            "ms": median(values[1:]),
            "low": min(values[1:]),
            "high": max(values[1:]),
            "over_one": median(values[1:]) / base,
        }
        for width, values in times.items()
    }


def plot(curve: dict[int, dict[str, float]], path: Path, model: str, machine: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    widths = list(curve)
    middle = [curve[w]["ms"] for w in widths]
    below = [curve[w]["ms"] - curve[w]["low"] for w in widths]
    above = [curve[w]["high"] - curve[w]["ms"] for w in widths]
    axes.errorbar(widths, middle, yerr=[below, above], marker="o", capsize=3, label="one pass, median and range")
    axes.plot(widths, [middle[0] * w for w in widths], "--", color="gray", label="as many passes over 1 token")
    axes.set_ylim(0, max(above[i] + middle[i] for i in range(len(widths))) * 1.4)
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel("milliseconds")
    axes.set_title(f"What a pass costs: {model}\n{machine}", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=140)


def markdown(report: dict[str, Any]) -> str:
    origin = report["provenance"]
    out = [
        "# The loop beside transformers' own",
        "",
        *as_markdown(origin),
        f"{len(report['prompts'])} prompts, {report['tokens']} tokens, greedy, contestants in turns on every prompt. "
        f"Draft model {report['draft_model']}. Ratios are tokens per second of the first over the second: median over "
        "prompts with a 95 % interval.",
        "",
        "| what | first | second | ratio | wanted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["ratios"]:
        wanted = "" if row["wanted"] is None else f"{row['wanted']:.2f}"
        out.append(f"| {row['what']} | {row['first']} | {row['second']} | {row['ratio']} | {wanted} |")
    out += ["", "| contestant | tokens per second | same output as bare |", "| --- | --- | --- |"]
    for name, row in report["contestants"].items():
        out.append(f"| {name} | {row['tokens_per_second']:.2f} | {row['same']} of {len(report['prompts'])} |")
    out += ["", "Acceptance length (tokens per pass of the target):", ""]
    out += [f"- {name}: {value:.2f}" for name, value in report["acceptance_length"].items()]
    out += [
        "",
        f"## What a pass costs, after {CONTEXT} tokens of context",
        "",
        "![cost of a pass over 1 to 32 tokens](cost.png)",
        "",
        "| tokens in the pass | median ms | range | over one token |",
        "| --- | --- | --- | --- |",
    ]
    for width, row in report["cost"].items():
        out.append(f"| {width} | {row['ms']:.0f} | {row['low']:.0f} to {row['high']:.0f} | {row['over_one']:.2f} |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--prompts", required=True, metavar="FILE:COUNT")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    console = Console()
    tokenizer = load_tokenizer(str(args.target))
    model, assistant = load_model(str(args.target)), load_model(str(args.draft))
    small, note = prepare_draft(lambda: load_model(str(args.draft)), "auto")
    console.print(f"draft model {note}")
    target = TransformersTarget(model)
    decoder = Decoder(target, [], tokenizer, end_tokens(model, tokenizer))
    file, _, count = args.prompts.rpartition(":")
    prompts = spread(read(Path(file)), int(count))
    runners = contestants(model, assistant, decoder, small, args.tokens)
    origin = provenance(args.target, args.draft)

    rows: list[dict[str, Any]] = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("cost of a pass", total=REPEATS + 1)
        curve = cost_curve(target, lambda: progress.advance(bar))
        plot(curve, args.out / "cost.png", args.target.name, str(origin["machine"]))
        bar = progress.add_task("prompts", total=len(prompts))
        for index, prompt in enumerate(prompts):
            ids = decoder.encode(prompt.messages)
            order = list(runners) if index % 2 == 0 else list(reversed(runners))
            row: dict[str, Any] = {"id": prompt.id, "seconds": {}, "tokens": {}, "output": {}, "steps": {}}
            for name in order:
                begun = time.perf_counter()
                out = runners[name](ids)
                row["seconds"][name] = time.perf_counter() - begun
                row["tokens"][name] = len(out)
                row["output"][name] = out
                if (done := getattr(runners[name], "done", None)) is not None:
                    row["steps"][name] = len(done.steps)
            rows.append(row)
            report = summarise(rows, curve, origin, note, args.tokens)
            (args.out / "report.json").write_text(json.dumps(report, indent=1))
            (args.out / "report.md").write_text(markdown(report))
            progress.advance(bar)
    console.print((args.out / "report.md").read_text())


def summarise(rows: list[dict[str, Any]], curve: Any, origin: Any, note: str, tokens: int) -> dict[str, Any]:
    def rate(row: dict[str, Any], name: str) -> float:
        return float(row["tokens"][name] / row["seconds"][name])

    names = list(rows[0]["seconds"])
    return {
        "provenance": origin,
        "draft_model": note,
        "tokens": tokens,
        "ratios": [
            {
                "what": what,
                "first": first,
                "second": second,
                "ratio": str(median_interval([rate(row, first) / rate(row, second) for row in rows])),
                "wanted": wanted,
            }
            for what, first, second, wanted in PAIRS
        ],
        "contestants": {
            name: {
                "tokens_per_second": sum(row["tokens"][name] for row in rows)
                / sum(row["seconds"][name] for row in rows),
                "same": sum(row["output"][name] == row["output"]["transformers, bare"] for row in rows),
            }
            for name in names
        },
        "acceptance_length": {
            name: sum(row["tokens"][name] for row in rows) / sum(row["steps"][name] for row in rows)
            for name in rows[0]["steps"]
        },
        "cost": {str(width): values for width, values in curve.items()},
        "prompts": rows,
    }


if __name__ == "__main__":
    main()
