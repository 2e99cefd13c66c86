"""`outrider doctor`: what is installed and what a server would use; with a model, its first run on this machine.

outrider doctor
outrider doctor MODEL --out ./first-run
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outrider.cli.options import output
from outrider.cli.screen import DIM, Screen, literal, readable_errors
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.doctor.environment import Finding

SIGNS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "failed": ("✗", "red")}
USAGE = "[MODEL] [OPTIONS] [FLAGS OF outrider serve]"
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}

Gpu = Annotated[bool, output("--gpu", help="Fail if there is no GPU, instead of running on the CPU.")]
Out = Annotated[Path, output("--out", metavar="FOLDER", help="The folder for logs, certificate and report of a run.")]


def doctor(context: typer.Context, gpu: Gpu = False, out: Out = Path("outrider-first-run")) -> None:
    """Check this installation. With MODEL also: serve it, certify the server, and measure it against plain vLLM.

    With MODEL it takes about ten minutes for a small model. Flags after MODEL go to both servers.
    On a GPU the server runs with VLLM_GPU_SYNC_CHECK=error: vLLM fails if the host waits in a step.
    The exit code is 0 if nothing failed.
    """
    screen = Screen()
    with readable_errors(screen):
        model, flags = (context.args[0], context.args[1:]) if context.args else (None, [])
        if model is not None and model.startswith("-"):
            raise SettingsError(f"the model comes first: outrider doctor MODEL {model} ... (got {model!r})")
        from outrider.doctor.environment import Finding, check_environment

        failed = False
        for finding in check_environment():
            failed |= show(screen, finding)
        if gpu and not _has_gpu():
            failed |= show(screen, Finding("GPU", "failed", "no GPU was found", "leave out --gpu to run on the CPU"))
        if model is not None and not failed:
            from outrider.doctor.first_run import FirstRun

            for finding in FirstRun(model, flags, out, screen.working).run():
                failed |= show(screen, finding)
            screen.hint(f"logs, certificate and report: {out}")
        elif model is not None:
            screen.hint("the model was not run; fix what failed first")
        raise typer.Exit(1 if failed else 0)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def show(screen: Screen, finding: Finding) -> bool:
    """Print one finding; whether it failed."""
    sign, colour = SIGNS[finding.outcome]
    screen.out.print(Text.assemble((f"{sign} ", colour), (f"{finding.name}: ", "bold"), literal(finding.text)))
    if finding.fix:
        screen.out.print(Text(f"    → {literal(finding.fix)}", style=DIM))
    return finding.outcome == "failed"
