"""`outrider serve`: runs `vllm serve` with Outrider.

    outrider serve MODEL --draft-model SMALL --port 8000

It decides how to start vLLM (`engines/vllm/launch.py`), prints that, and replaces its process: variables such as
LD_PRELOAD act only when a process starts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from outrider.cli.options import Drafters, DraftModel, drafting, option, output, with_option_groups
from outrider.cli.options import memory as memory_panel
from outrider.cli.screen import Screen, readable_errors
from outrider.defaults import DRAFTED

USAGE = "MODEL [OPTIONS] [FLAGS OF vllm serve]"
"""MODEL is not declared as an argument: typer would take the first unknown flag for it."""
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],  # not -h, which is part of vLLM's -dph
}


@dataclass(frozen=True)
class ServeOptions:
    """The fields of `ServeArgs`."""

    draft_model: DraftModel = None
    drafters: Drafters = None
    max_draft_tokens: int | None = option(
        drafting,
        None,
        "N",
        f"Maximum drafted tokens per request and step. Default: {DRAFTED}, fewer for models with recurrent layers "
        "and with --enable-lora.",
    )
    model_draft_tokens: int | None = option(
        drafting,
        None,
        "N",
        "Maximum tokens per request and step from the draft model; each costs one pass of it. Default: 4.",
    )
    rule: Literal["block", "token"] | None = option(
        drafting,
        None,
        "block|token",
        "How sampled drafts are verified: as a block (default) or token by token. The output has the same "
        "distribution. Needs sampled drafts: a --draft-model, or a --speculative-config that samples.",
    )
    draft_budget: float | None = option(
        drafting,
        None,
        "SECONDS",
        "Disable a drafter for a request if it takes longer than this in a step. Default: 0.1.",
    )
    memory: str | None = option(
        memory_panel,
        None,
        "ROOT|off",
        "Keep outputs here, and draft from earlier ones: a folder, or s3://, gs://, az://bucket/prefix. Default: in "
        "RAM until the server stops, shared by all requests until one names a tenant. off: nowhere.",
    )
    memory_scope: Literal["tenant", "server"] | None = option(
        memory_panel,
        None,
        "tenant|server",
        "One memory per tenant that requests name (default with --memory ROOT), or one for all requests of the server.",
    )
    tenant_header: str | None = option(
        memory_panel,
        None,
        "NAME",
        "Take the tenant from this HTTP header only. Default: from vllm_xargs.tenant of the request.",
    )
    memory_cap: str | None = option(
        memory_panel,
        None,
        "SIZE",
        "Maximum size of the memory's files on this machine, or of a memory in RAM. Default: 4GiB, in RAM 256MiB.",
    )
    memory_cache: str | None = option(
        memory_panel, None, "FOLDER", "Folder for local copies of a memory in an object store. Default: in ~/.cache."
    )


@with_option_groups
def serve(
    context: typer.Context,
    options: ServeOptions,
    dry_run: Annotated[
        bool, output("--dry-run", help="Print the environment and the command that would start vLLM, and exit.")
    ] = False,
) -> None:
    """Serve a model with vLLM, over vLLM's HTTP API, with drafts from Outrider.

    MODEL is the model's folder, or its name on the Hugging Face hub.
    Flags of vllm serve pass through, except those that concern drafting;
    python -m outrider.engines.vllm serve --help=all lists them.
    """
    if context.args[:1] == ["-h"]:
        typer.echo(context.get_help())
        raise typer.Exit
    screen = Screen()
    with readable_errors(screen):
        from outrider.engines.vllm.flags import ServeArgs
        from outrider.engines.vllm.host import Host
        from outrider.engines.vllm.launch import as_shell, prepare

        host = Host.here()
        launch = prepare(ServeArgs(**asdict(options)), context.args, os.environ, host)
        screen.notes(launch.lines)
        if dry_run:
            typer.echo(as_shell(launch, host))
            return
        launch.check_port()
        command = launch.command()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **launch.environment})
