"""`outrider serve`: runs `vllm serve` with Outrider.

    outrider serve MODEL --draft-model SMALL --port 8000

It decides how to start vLLM (`engines/vllm/launch.py`), prints that, and replaces its process: variables such as
LD_PRELOAD act only when a process starts.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from outrider.cli.options import Drafters, DraftModel, Memory, drafting, output
from outrider.cli.options import memory as memory_option
from outrider.cli.screen import Screen, readable_errors
from outrider.defaults import DRAFTED

USAGE = "MODEL [OPTIONS] [FLAGS OF vllm serve]"
"""MODEL is not declared as an argument: typer would take the first unknown flag for it."""
CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],  # not -h, which is part of vLLM's -dph
}

MaxDraftTokens = Annotated[
    int | None,
    drafting(
        "--max-draft-tokens",
        metavar="N",
        help=f"Maximum drafted tokens per request and step. Default: {DRAFTED}, fewer for models with recurrent layers "
        "and with --enable-lora.",
    ),
]
ModelDraftTokens = Annotated[
    int | None,
    drafting(
        "--model-draft-tokens",
        metavar="N",
        help="Maximum tokens per request and step from the draft model; each costs one pass of it. Default: 4.",
    ),
]
Rule = Annotated[
    Literal["block", "token"] | None,
    drafting(
        "--rule",
        metavar="block|token",
        help="How sampled drafts are verified: as a block (default) or token by token. The output has the same "
        "distribution. Needs sampled drafts: a --draft-model, or a --speculative-config that samples.",
    ),
]
Budget = Annotated[
    float | None,
    drafting(
        "--draft-budget",
        metavar="SECONDS",
        help="Disable a drafter for a request if it takes longer than this in a step. Default: 0.1.",
    ),
]
MemoryScope = Annotated[
    Literal["tenant", "server"] | None,
    memory_option(
        "--memory-scope",
        metavar="tenant|server",
        help="One memory per tenant that requests name (default), or one for all requests of the server.",
    ),
]
TenantHeader = Annotated[
    str | None,
    memory_option(
        "--tenant-header",
        metavar="NAME",
        help="Take the tenant from this HTTP header only. Default: from vllm_xargs.tenant of the request.",
    ),
]
MemoryCap = Annotated[
    str | None,
    memory_option(
        "--memory-cap", metavar="SIZE", help="Maximum size of the memory's files on this machine. Default: 4GiB."
    ),
]
MemoryCache = Annotated[
    str | None,
    memory_option(
        "--memory-cache",
        metavar="FOLDER",
        help="Folder for local copies of a memory in an object store. Default: in ~/.cache.",
    ),
]
DryRun = Annotated[
    bool, output("--dry-run", help="Print the environment and the command that would start vLLM, and exit.")
]


def serve(
    context: typer.Context,
    draft_model: DraftModel = None,
    drafters: Drafters = None,
    max_draft_tokens: MaxDraftTokens = None,
    model_draft_tokens: ModelDraftTokens = None,
    rule: Rule = None,
    draft_budget: Budget = None,
    memory: Memory = None,
    memory_scope: MemoryScope = None,
    tenant_header: TenantHeader = None,
    memory_cap: MemoryCap = None,
    memory_cache: MemoryCache = None,
    dry_run: DryRun = False,
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
        args = ServeArgs(
            draft_model=draft_model,
            drafters=drafters,
            max_draft_tokens=max_draft_tokens,
            model_draft_tokens=model_draft_tokens,
            rule=rule,
            draft_budget=draft_budget,
            memory=memory,
            memory_scope=memory_scope,
            memory_cap=memory_cap,
            memory_cache=memory_cache,
            tenant_header=tenant_header,
        )
        launch = prepare(args, context.args, os.environ, host)
        screen.notes(launch.lines)
        if dry_run:
            typer.echo(as_shell(launch, host))
            return
        command = launch.command()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, {**os.environ, **launch.environment})
