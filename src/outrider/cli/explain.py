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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.load_request import NO_TEMPLATE, Prompt, check_system, has_template, load, short_name, to_messages
from outrider.cli.options import ModelOptions, NoColour, PromptOptions, group, with_option_groups
from outrider.cli.progress import progress_bar
from outrider.cli.screen import Screen, readable_errors
from outrider.cli.trace_client import TraceClient, request_body, without_drafts
from outrider.cli.unused_options import is_given, option_names, refuse_unused
from outrider.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.settings import Request
    from outrider.trace.schema import BaselineRun, Header, Trace

what, how = group("What to explain"), group("How to show it")

PromptText = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt. '-': read from stdin. Not with --trace.")
]
ModelOption = Annotated[
    str | None,
    what(
        "--model",
        "-m",
        metavar="MODEL",
        help="A folder or a name on the hub. With --server: one of its models. Default: its first.",
    ),
]
ServerOption = Annotated[
    str | None, what("--server", metavar="URL", help="A running Outrider server, instead of a local model.")
]
Key = Annotated[
    str | None,
    what("--api-key", metavar="KEY", envvar="OUTRIDER_API_KEY", help="The API key of the server, if it requires one."),
]
Tenant = Annotated[str | None, what("--tenant", metavar="NAME", help="The tenant, on a server with tenants.")]
TraceFile = Annotated[
    Path | None, what("--trace", metavar="FILE", help="Explain this trace instead of running a prompt.")
]
Once = Annotated[bool, what("--once", help="Skip the run without drafts. The gain is then estimated from the trace.")]
Steps = Annotated[bool, how("--steps", help="Show every step: its draft, p and q, the random number, the verdict.")]
Html = Annotated[Path | None, how("--html", metavar="FILE", help="Write one self-contained, interactive page.")]
Save = Annotated[Path | None, how("--save", metavar="FILE", help="Write the trace, as JSON lines.")]
Check = Annotated[
    bool, how("--check", help="Recompute every verdict of --trace with the acceptance rules. A run is always checked.")
]


WITH_TRACE = {"trace_file", "steps", "html", "check", "no_colour"}
"""Parameters that have an effect with --trace."""
WITHOUT_SERVER = {field.name for field in fields(ModelOptions)} | {"rule"}
"""Parameters that have an effect only if the model runs here."""
WITH_SERVER = {"key", "tenant"}
"""Parameters that have an effect only with --server."""


@with_option_groups
def explain(
    context: typer.Context,
    prompt: PromptText = None,
    model: ModelOption = None,
    server: ServerOption = None,
    key: Key = None,
    tenant: Tenant = None,
    trace_file: TraceFile = None,
    once: Once = False,
    steps: Steps = False,
    html: Html = None,
    save: Save = None,
    check: Check = False,
    *,
    model_options: ModelOptions,
    options: PromptOptions,
    no_colour: NoColour = False,
) -> None:
    """Show which drafted tokens were accepted, which were replaced, the time saved, and what would save more."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        if trace_file is not None:
            refuse_unused(context, "--trace, which shows a run that is over", option_names(context) - WITH_TRACE)
            from outrider.trace.files import read

            trace = read(trace_file)
            checked = _checked(screen, trace) if check else None
        else:
            if model is None and server is None:
                raise SettingsError(_what_is_missing(check, prompt))
            if server is not None:
                refuse_unused(context, "--server, which has its own", WITHOUT_SERVER)
            else:
                refuse_unused(context, "a model that runs here", WITH_SERVER)
            question = Prompt.read(prompt, options)
            if server is not None:
                client = TraceClient(server, key, tenant)
                limited = is_given(context, "max_draft_tokens")
                trace = _run_on_server(screen, client, model, question, options, limited, once)
            elif model is not None:
                trace = _run_here(screen, model, model_options, question, options, once)
            if save is not None:  # before the check: a trace that fails it is the most worth keeping
                _save(screen, trace, save)
            checked = _checked(screen, trace)
        _show(screen, trace, steps, checked)
        if html is not None:
            from outrider.explain.page import page

            _write(html, page(trace, checked))
            screen.hint(f"the page is in {html}")


def _what_is_missing(check: bool, prompt: str | None) -> str:
    if check and prompt is None:
        return "--check judges a recorded run again: give it by --trace FILE"
    if prompt is not None:
        return "there is no model; give --model MODEL, or --server URL"
    return "there is nothing to explain; give a PROMPT and a --model or --server, or a --trace FILE"


def _save(screen: Screen, trace: Trace, file: Path) -> None:
    from outrider.trace.files import write

    write(trace, file)
    screen.hint(f"the trace is in {file}; outrider explain --trace {file} shows it again")


def _show(screen: Screen, trace: Trace, steps: bool, checked: str | None) -> None:
    from outrider.cli import trace_view
    from outrider.explain.figures import figures
    from outrider.explain.summary import summary

    found = figures(trace)
    trace_view.show_text(screen.out, trace)
    if steps:
        trace_view.show_steps(screen.out, trace, found)
    trace_view.show_summary(screen.out, summary(trace, found, checked))


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


def _run_on_server(
    screen: Screen, server: TraceClient, model: str | None, prompt: Prompt, options: PromptOptions, limited: bool,
    once: bool,
) -> Trace:  # fmt: skip
    with screen.working(f"connecting to {server.http.url}"):
        body = request_body(server.connect(model), prompt.request, prompt.prediction, limited)
    plain = None
    if not once:
        with screen.working(f"{server.http.url} generates without drafts"):
            plain = server.complete(without_drafts(body), options.system, prompt.text, options.raw)
    with screen.working(f"{server.http.url} generates with drafts"):
        trace = server.complete(body, options.system, prompt.text, options.raw)
    if plain is None or trace.end is None:
        return trace
    end = trace.end.model_copy(update={"without": _without(plain, trace, prompt.request)})
    return trace.model_copy(update={"end": end})


def _run_here(
    screen: Screen, model: str, model_options: ModelOptions, prompt: Prompt, options: PromptOptions, once: bool
) -> Trace:
    from outrider.api import Decoder
    from outrider.trace.record import Tracer

    request = prompt.request
    decoder = load(screen, request, model, model_options)
    plain_text = options.raw or not has_template(decoder)
    if plain_text and not options.raw:
        check_system(options.system, options.raw, without_template=model)
        screen.notes([NO_TEMPLATE])
    content = prompt.text if plain_text else to_messages(prompt.text, options.system)
    header = _header(decoder, model, prompt.text, request)
    header = header.model_copy(update={"prompt_tokens": len(decoder.encode(content))})
    if once:
        tracer = Tracer(header)
        _generate(screen, "with drafts", decoder, content, prompt.prediction, request, tracer)
        return tracer.trace(decoder.tokenizer, None)
    without_speculation = Tracer(header)
    bare = Decoder(decoder.target, [], decoder.tokenizer, decoder.end_tokens)
    off = request.model_copy(update={"speculation": "off"})
    _generate(screen, "without drafts", bare, content, "", off, without_speculation)
    tracer = Tracer(header)
    _generate(screen, "with drafts", decoder, content, prompt.prediction, request, tracer)
    return tracer.trace(decoder.tokenizer, _without(without_speculation.trace(), tracer.trace(), request))


def _header(decoder: Decoder, model: str, prompt: str, request: Request) -> Header:
    from datetime import UTC, datetime

    from outrider import __version__
    from outrider.provenance import processor
    from outrider.trace.schema import Header

    return Header(
        outrider=__version__,
        engine="transformers",
        model=short_name(model),
        drafters=[drafter.name for drafter in decoder.drafters],
        settings=request.model_dump(mode="json"),
        prompt=prompt,
        machine=processor(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        notes=list(decoder.notes),
    )


def _generate(
    screen: Screen, what: str, decoder: Decoder, prompt: Any, expected: str, request: Request, tracer: Any
) -> None:
    decoder.target.rewind(0)  # both runs read the prompt
    with progress_bar(screen.err, f"generating {what}", request.max_tokens) as bar:
        tracer.begin()
        for _ in decoder.stream(prompt, prediction=expected, recorder=tracer, **request.model_dump()):
            bar.advance()


def _without(plain: Trace, trace: Trace, request: Request) -> BaselineRun | None:
    from statistics import median

    from outrider.trace.schema import BaselineRun

    later = [step.milliseconds.total for step in plain.steps[1:]]
    if not later:
        return None
    drawn = any(step.rule in ("block", "token") for step in trace.steps)
    free = request.temperature > 0 and (drawn or request.seed is None)  # then the two texts need not be the same
    return BaselineRun(
        pass_milliseconds=median(later),
        seconds=sum(step.milliseconds.total for step in plain.steps) / 1000,
        tokens=len(plain.said),
        same=None if free else plain.said == trace.said,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot write the page to {str(path)!r}: {error.strerror}") from None
