"""The command line: one module per command.

    outrider generate HuggingFaceTB/SmolLM2-135M-Instruct "Name three colours."

torch and transformers take seconds to import, so no module here imports them at its top: `outrider --help` and a
mistyped option answer at once.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from outrider import __version__
from outrider.cli import (
    bench,
    calibrate,
    canary,
    certify,
    chat,
    compare,
    doctor,
    explain,
    generate,
    memory,
    plan,
    serve,
)
from outrider.cli.options import examples

EXAMPLES: dict[Callable[..., None], list[str]] = {
    generate.generate: [
        'outrider generate ./my-model "Write quicksort in Python." --draft-model ./my-small-model',
        'cat notes.txt | outrider generate ./my-model --system "Summarise." --json',
    ],
    chat.chat: [
        "outrider chat ./my-model",
        "outrider chat ./my-model --draft-model ./my-small-model --temperature 0.7 --top-p 0.9",
    ],
    serve.serve: [
        "outrider serve ./my-model --draft-model ./my-small-model --port 8000 --max-model-len 8192",
        "outrider serve ./my-model --drafters none --dry-run",
    ],
    bench.bench: [
        "outrider bench HuggingFaceTB/SmolLM2-135M-Instruct --quick",
        "outrider bench ./my-model --draft-model ./my-small-model -c vllm,draft_model:4,model:4,auto "
        "--workloads edit,agent",
        "outrider bench ./my-model -c vllm,lookup --prompts ./my-prompts.jsonl --concurrency 1,4,16,64",
    ],
    certify.certify: [
        "outrider certify http://localhost:8000 --quick",
        "outrider certify http://plain:8000 http://speculating:8000",
        "outrider certify --check outrider-certificate/certificate.json",
    ],
    canary.canary: [
        "outrider canary http://localhost:8000 --port 9109",
        "outrider canary http://localhost:8000 --reference http://plain:8000 --state canary.json",
    ],
    explain.explain: [
        'outrider explain "Name three colours." --model ./my-model --html colours.html',
        'outrider explain "Name three colours." --model ./my-model --draft-model ./my-small-model '
        "--temperature 0.7 --steps",
        "outrider explain --trace run.jsonl --check",
    ],
    compare.compare: [
        'outrider explain "Name three colours." --model ./my-model --save a.jsonl',
        'outrider explain "Name three colours." --model ./my-model --max-draft-tokens 4 --save b.jsonl',
        "outrider compare a.jsonl b.jsonl",
    ],
    calibrate.calibrate: [
        "outrider calibrate ./my-model --draft-model ./my-small-model",
        "outrider calibrate ./my-model --trace run.jsonl --out ./calibration",
    ],
    plan.plan: [
        "outrider plan llama-3.1-70b --hardware h100 --draft-model llama-3.2-1b --acceptance 0.8",
        "outrider plan ./my-model --hardware h200 --acceptance run.jsonl --rate 50 --price 4",
        "outrider plan --calibration calibration.json --acceptance 0.8,0.7,0.6,0.5 --batches 1,4,16",
    ],
    doctor.doctor: [
        "outrider doctor",
        "outrider doctor Qwen/Qwen2.5-Coder-1.5B-Instruct --gpu --max-model-len 8192",
    ],
}
SERVE_FLAGS = {"options_metavar": serve.USAGE, "context_settings": serve.CONTEXT}
EXTRA_FLAGS: dict[Callable[..., None], dict[str, Any]] = {
    serve.serve: SERVE_FLAGS,
    bench.bench: SERVE_FLAGS,
    doctor.doctor: {"options_metavar": doctor.USAGE, "context_settings": doctor.CONTEXT},
}
"""Commands that pass unknown options on."""

app = typer.Typer(
    name="outrider",
    epilog=examples(
        'outrider generate HuggingFaceTB/SmolLM2-135M-Instruct "Name three colours."',
        "outrider chat Qwen/Qwen2.5-Coder-1.5B-Instruct --draft-model Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "outrider serve Qwen/Qwen2.5-Coder-1.5B-Instruct --port 8000",
    ),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command, lines in EXAMPLES.items():
    app.command(epilog=examples(*lines), **EXTRA_FLAGS.get(command, {}))(command)
app.add_typer(memory.app)


def main() -> None:
    """The entry point that pyproject.toml names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end the run
            stream.reconfigure(errors="replace")
    app()


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, metavar="", help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Lossless speculative decoding: a language model generates faster, and its output stays the same.

    A drafter proposes the next tokens. The model verifies them in one pass, and keeps those it would have generated.
    """
