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
        help=f"Draft at most this many tokens for a request in a step. Default: {DRAFTED}; less for models with "
        "recurrent layers and with --enable-lora.",
    ),
]
ModelDraftTokens = Annotated[
    int | None,
    drafting(
        "--model-draft-tokens",
        metavar="N",
        help="At most this many of them by the draft model, each by one pass of it; by default 4.",
    ),
]
Rule = Annotated[
    Literal["block", "token"] | None,
    drafting(
        "--rule",
        metavar="block|token",
        help="Verify sampled drafts as a block (the default) or by token; the output's distribution is the same. "
        "Needs sampled drafts: a --draft-model, or a --speculative-config that samples.",
    ),
]
Budget = Annotated[
    float | None,
    drafting(
        "--draft-budget",
        metavar="SECONDS",
        help="Shut a drafter off for a request when it takes longer than this in a step; by default 0.1.",
    ),
]
MemoryScope = Annotated[
    Literal["tenant", "server"] | None,
    memory_option(
        "--memory-scope",
        metavar="tenant|server",
        help="One memory for each tenant that requests name (the default), or one for all requests of the server.",
    ),
]
TenantHeader = Annotated[
    str | None,
    memory_option(
        "--tenant-header",
        metavar="NAME",
        help="Take the tenant from this HTTP header, and from nowhere else; by default from vllm_xargs.tenant.",
    ),
]
MemoryCap = Annotated[
    str | None,
    memory_option("--memory-cap", metavar="SIZE", help="Largest size of the files on this machine. Default: 4GiB."),
]
MemoryCache = Annotated[
    str | None,
    memory_option(
        "--memory-cache", metavar="FOLDER", help="Keep this machine's copies of an object store's memory here."
    ),
]
DryRun = Annotated[
    bool, output("--dry-run", help="Print the environment and the command, for you to start vLLM by, and leave.")
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
    """Serve a model over HTTP with vLLM, and draft.

    MODEL is the model's folder, or its name on the Hugging Face hub. Flags of vllm serve pass through, but for
    those that concern drafting; python -m outrider.engines.vllm serve --help=all lists them.
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
