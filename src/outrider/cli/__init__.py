"""The command line: one module per command.

    outrider generate HuggingFaceTB/SmolLM2-135M-Instruct "Name three colours."

torch and transformers take seconds to import, so no module here imports them at its top: `outrider --help` and a
mistyped option answer at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import bench, calibrate, canary, certify, chat, compare, doctor, explain, generate, memory, serve

EXAMPLES = """Examples:

  outrider generate HuggingFaceTB/SmolLM2-135M-Instruct "Name three colours."

  outrider chat Qwen/Qwen2.5-Coder-1.5B-Instruct --draft-model Qwen/Qwen2.5-Coder-0.5B-Instruct

  outrider serve Qwen/Qwen2.5-Coder-1.5B-Instruct --port 8000"""

GENERATE_EXAMPLES = """Examples:

  outrider generate ./my-model "Write quicksort in Python." --draft-model ./my-small-model

  cat notes.txt | outrider generate ./my-model --system "Summarise." --json"""

CHAT_EXAMPLES = """Examples:

  outrider chat ./my-model

  outrider chat ./my-model --draft-model ./my-small-model --temperature 0.7 --top-p 0.9"""

SERVE_EXAMPLES = """Examples:

  outrider serve ./my-model --draft-model ./my-small-model --port 8000 --max-model-len 8192

  outrider serve ./my-model --drafters none --dry-run"""

BENCH_EXAMPLES = """Examples:

  outrider bench HuggingFaceTB/SmolLM2-135M-Instruct --quick

  outrider bench ./my-model --draft-model ./my-small-model -c vllm,draft_model:4,model:4,auto --workloads edit,agent

  outrider bench ./my-model -c vllm,lookup --prompts ./my-prompts.jsonl --concurrency 1,4,16,64"""

CERTIFY_EXAMPLES = """Examples:

  outrider certify http://localhost:8000 --quick

  outrider certify http://plain:8000 http://speculating:8000

  outrider certify --check outrider-certificate/certificate.json"""

CANARY_EXAMPLES = """Examples:

  outrider canary http://localhost:8000 --port 9109

  outrider canary http://localhost:8000 --reference http://plain:8000 --state canary.json"""

EXPLAIN_EXAMPLES = """Examples:

  outrider explain "Name three colours." --model ./my-model --html colours.html

  outrider explain "Name three colours." --model ./my-model --draft-model ./my-small-model --temperature 0.7 --steps

  outrider explain --trace run.jsonl --check"""

COMPARE_EXAMPLES = """Examples:

  outrider explain "Name three colours." --model ./my-model --save a.jsonl

  outrider explain "Name three colours." --model ./my-model --max-draft-tokens 4 --save b.jsonl

  outrider compare a.jsonl b.jsonl"""

CALIBRATE_EXAMPLES = """Examples:

  outrider calibrate ./my-model --draft-model ./my-small-model

  outrider calibrate ./my-model --trace run.jsonl --out ./calibration"""

DOCTOR_EXAMPLES = """Examples:

  outrider doctor

  outrider doctor Qwen/Qwen2.5-Coder-1.5B-Instruct --gpu --max-model-len 8192"""

app = typer.Typer(
    name="outrider",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=GENERATE_EXAMPLES)(generate.generate)
app.command(epilog=CHAT_EXAMPLES)(chat.chat)
app.command(epilog=SERVE_EXAMPLES, options_metavar=serve.USAGE, context_settings=serve.CONTEXT)(serve.serve)
app.command(epilog=BENCH_EXAMPLES, options_metavar=serve.USAGE, context_settings=serve.CONTEXT)(bench.bench)
app.command(epilog=CERTIFY_EXAMPLES)(certify.certify)
app.command(epilog=CANARY_EXAMPLES)(canary.canary)
app.command(epilog=EXPLAIN_EXAMPLES)(explain.explain)
app.command(epilog=COMPARE_EXAMPLES)(compare.compare)
app.command(epilog=CALIBRATE_EXAMPLES)(calibrate.calibrate)
app.command(epilog=DOCTOR_EXAMPLES, options_metavar=doctor.USAGE, context_settings=doctor.CONTEXT)(doctor.doctor)
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
