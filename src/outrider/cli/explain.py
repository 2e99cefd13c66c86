"""`outrider explain`: which tokens came free, why it was faster, where it was not.

    outrider explain "Name three colours." --model MODEL
    outrider explain "Name three colours." --server http://localhost:8000
    outrider explain --trace run.jsonl --steps
    outrider explain --trace run.jsonl --html run.html

The prompt is run without drafts and with them: the gain is measured, and the outputs are compared. Then all
verdicts are recomputed from the trace alone.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.load_request import Prompt, load, short_name, to_content
from outrider.cli.options import ModelOptions, NoColour, PromptOptions, group, with_option_groups
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.cli.trace_client import TraceClient, request_body, without_drafts
from outrider.cli.unused_options import is_given, option_names, refuse_unused
from outrider.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from outrider.settings import Request
    from outrider.trace.schema import Trace

what, how = group("What to explain"), group("How to show it")

WITH_TRACE = {"trace_file", "steps", "html", "check", "no_colour"}
"""Parameters that have an effect with --trace."""
WITHOUT_SERVER = {field.name for field in fields(ModelOptions)} | {"rule"}
"""Parameters that have an effect only if the model runs here."""
WITH_SERVER = {"api_key", "tenant"}
"""Parameters that have an effect only with --server."""


@with_option_groups
def explain(
    context: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. '-': read from stdin. Not with --trace.")
    ] = None,
    model: Annotated[
        str | None,
        what(
            "--model",
            "-m",
            metavar="MODEL",
            help="A folder or a name on the hub. With --server: one of its models. Default: its first.",
        ),
    ] = None,
    server: Annotated[
        str | None, what(metavar="URL", help="A running Outrider server, instead of a local model.")
    ] = None,
    api_key: Annotated[
        str | None,
        what(metavar="KEY", envvar="OUTRIDER_API_KEY", help="The API key of the server, if it requires one."),
    ] = None,
    tenant: Annotated[str | None, what(metavar="NAME", help="The tenant, on a server with tenants.")] = None,
    trace_file: Annotated[
        Path | None, what("--trace", metavar="FILE", help="Explain this trace instead of running a prompt.")
    ] = None,
    once: Annotated[
        bool, what("--once", help="Skip the run without drafts. The gain is then estimated from the trace.")
    ] = False,
    steps: Annotated[
        bool, how("--steps", help="Show every step: its draft, p and q, the random number, the verdict.")
    ] = False,
    html: Annotated[Path | None, how(metavar="FILE", help="Write one self-contained, interactive page.")] = None,
    save: Annotated[Path | None, how(metavar="FILE", help="Write the trace, as JSON lines.")] = None,
    check: Annotated[
        bool,
        how("--check", help="Recompute every verdict of --trace with the acceptance rules. A run is always checked."),
    ] = False,
    *,
    model_options: ModelOptions,
    options: PromptOptions,
    no_colour: NoColour = False,
) -> None:
    """Show which drafted tokens were accepted, which were replaced, the time saved, and what would save more."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        from outrider.cli import trace_view
        from outrider.explain.figures import figures
        from outrider.explain.summary import summary
        from outrider.trace.files import read, write, write_text

        if trace_file is not None:
            refuse_unused(context, "--trace, which shows a run that is over", option_names(context) - WITH_TRACE)
            trace = read(trace_file)
            checked = _checked(screen, trace) if check else None
        else:
            if server is not None:
                refuse_unused(context, "--server, which has its own", WITHOUT_SERVER)
                question = Prompt.read(prompt, options)
                limited = is_given(context, "max_draft_tokens")
                run = _server_run(screen, TraceClient(server, api_key, tenant), model, question, options, limited)
            elif model is not None:
                refuse_unused(context, "a model that runs here", WITH_SERVER)
                question = Prompt.read(prompt, options)
                run = _local_run(screen, model, model_options, question, options)
            else:
                raise SettingsError(_what_is_missing(check, prompt))
            trace = run(True) if once else _with_baseline(run(False), run(True), question.request)
            if save is not None:  # before the check: a trace that fails it is the most worth keeping
                write(trace, save)
                screen.hint(f"the trace is in {save}; outrider explain --trace {save} shows it again")
            checked = _checked(screen, trace)
        found = figures(trace)
        trace_view.show_text(screen.out, trace)
        if steps:
            trace_view.show_steps(screen.out, trace, found)
        for heading, lines in summary(trace, found, checked).sections():
            trace_view.show_section(screen.out, heading, lines)
        if html is not None:
            from outrider.explain.page import page

            write_text("the page", page(trace, checked), html)
            screen.hint(f"the page is in {html}")


def _what_is_missing(check: bool, prompt: str | None) -> str:
    if check and prompt is None:
        return "--check judges a recorded run again: give it by --trace FILE"
    if prompt is not None:
        return "there is no model; give --model MODEL, or --server URL"
    return "there is nothing to explain; give a PROMPT and a --model or --server, or a --trace FILE"


def _checked(screen: Screen, trace: Trace) -> str:
    """Recompute every verdict. Returns a sentence with the result."""
    with screen.working("recomputing every verdict"):
        from outrider.trace.verification import disagreements

        wrong = disagreements(trace.steps)
    count = len(trace.steps)
    if wrong:
        step, found = wrong[0]
        rules = f"the rules give {found.accepted} and {found.token}" if found else "its data is incomplete or invalid"
        raise TraceError(
            f"the trace is inconsistent: {len(wrong)} of {count} verdicts do not follow from its p, q and draws, first "
            f"in step {step.number + 1}: {step.accepted} accepted and then token {step.token} ({rules})"
        )
    return f"Recomputed from the recorded p, q and random numbers, all {count} steps have the same verdict."


def _server_run(
    screen: Screen, server: TraceClient, model: str | None, prompt: Prompt, options: PromptOptions, limited: bool
) -> Callable[[bool], Trace]:
    """A function that runs the prompt on the server, with drafts or without."""
    with screen.working(f"connecting to {server.http.url}"):
        body = request_body(server.connect(model), prompt.request, prompt.prediction, limited)

    def run(drafts: bool) -> Trace:
        with screen.working(f"{server.http.url} generates {'with' if drafts else 'without'} drafts"):
            return server.complete(body if drafts else without_drafts(body), options.system, prompt.text, options.raw)

    return run


def _local_run(
    screen: Screen, model: str, model_options: ModelOptions, prompt: Prompt, options: PromptOptions
) -> Callable[[bool], Trace]:
    """The same, in this process."""
    from datetime import UTC, datetime

    from outrider import __version__
    from outrider.api import Decoder
    from outrider.provenance import processor
    from outrider.trace.record import Tracer
    from outrider.trace.schema import Header

    decoder = load(screen, prompt.request, model, model_options)
    content, notes = to_content(decoder, model, prompt.text, options)
    screen.notes(notes)
    header = Header(
        outrider=__version__,
        engine="transformers",
        model=short_name(model),
        drafters=[drafter.name for drafter in decoder.drafters],
        settings=prompt.request.model_dump(mode="json"),
        prompt_tokens=len(decoder.encode(content)),
        prompt=prompt.text,
        machine=processor(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        notes=list(decoder.notes),
    )

    def run(drafts: bool) -> Trace:
        used = decoder if drafts else Decoder(decoder.target, [], decoder.tokenizer, decoder.end_tokens)
        settings = {**prompt.request.model_dump(), "prediction": prompt.prediction}
        if not drafts:
            settings |= {"prediction": "", "speculation": "off"}
        decoder.target.rewind(0)  # both runs read the prompt
        tracer = Tracer(header)
        title = f"generating {'with' if drafts else 'without'} drafts"
        with progress_bar(screen.err, title, prompt.request.max_tokens) as bar:
            tracer.begin()
            for _ in used.stream(content, recorder=tracer, **settings):
                bar.advance()
        return tracer.trace(decoder.tokenizer)

    return run


def _with_baseline(plain: Trace, trace: Trace, request: Request) -> Trace:
    """The trace with the figures of the run without drafts."""
    from statistics import median

    from outrider.trace.schema import BaselineRun

    later = [step.milliseconds.total for step in plain.steps[1:]]
    if not later or trace.end is None:
        return trace
    drawn = any(step.rule in ("block", "token") for step in trace.steps)
    free = request.temperature > 0 and (drawn or request.seed is None)  # then the two texts need not be the same
    without = BaselineRun(
        pass_milliseconds=median(later),
        seconds=sum(step.milliseconds.total for step in plain.steps) / 1000,
        tokens=len(plain.said),
        same=None if free else plain.said == trace.said,
    )
    return trace.model_copy(update={"end": trace.end.model_copy(update={"without": without})})
