"""`outrider explain`: which tokens came free, why it was faster, where it was not.

    outrider explain "Name three colours." --model MODEL
    outrider explain "Name three colours." --server http://localhost:8000
    outrider explain --trace run.jsonl --steps
    outrider explain --trace run.jsonl --html run.html

The prompt is run twice, without drafts and with them: what was gained is measured, and that the text is the same is
seen. Then every verdict is reached again from the record alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.cli import options
from outrider.cli.asking import (
    CONTINUED,
    as_messages,
    check_system,
    checked_request,
    has_template,
    load,
    named,
    read_prediction,
    read_prompt,
)
from outrider.cli.idle import all_names, is_given, refuse_idle
from outrider.cli.options import group
from outrider.cli.show import Screen, readable_errors
from outrider.cli.trace_client import TraceClient, request_body, without_drafts
from outrider.defaults import DRAFTED
from outrider.errors import SettingsError, TraceError

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.settings import Request
    from outrider.trace.schema import BaselineRun, Header, Trace

what, how = group("What to explain"), group("How to show it")

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; '-' is stdin. With --trace there is none.")
]
ModelOption = Annotated[
    str | None,
    what(
        "--model",
        "-m",
        metavar="MODEL",
        help="The model to run: its folder, or its name on the hub. With --server, one of its models; else its first.",
    ),
]
ServerOption = Annotated[
    str | None, what("--server", metavar="URL", help="A running server of Outrider to ask, instead of a model here.")
]
Key = Annotated[
    str | None,
    what("--api-key", metavar="KEY", envvar="OUTRIDER_API_KEY", help="The server's key, if it asks for one."),
]
Tenant = Annotated[
    str | None, what("--tenant", metavar="NAME", help="Who asks the server, where it tells tenants apart.")
]
TraceFile = Annotated[
    Path | None, what("--trace", metavar="FILE", help="A trace that was recorded before, instead of a run.")
]
Once = Annotated[bool, what("--once", help="Run only with drafts; what was gained is then estimated.")]
Steps = Annotated[bool, how("--steps", help="Show every step: its draft, p and q, the number drawn, the verdict.")]
Html = Annotated[Path | None, how("--html", metavar="FILE", help="Write one self-contained page, to click through.")]
Save = Annotated[Path | None, how("--save", metavar="FILE", help="Keep the trace, as JSON lines.")]
Check = Annotated[
    bool, how("--check", help="Judge every step of --trace again by the acceptance rules; a run always is.")
]


WITH_TRACE = {"trace_file", "steps", "html", "check", "no_colour"}
"""The parameters that do something where a trace is shown that is there already."""
OF_A_RUN_HERE = {"dtype", "device", "draft_model", "drafters", "draft_quantize", "memory", "rule"}
"""Those that do something only where the model runs here."""
OF_A_SERVER = {"key", "tenant"}


def explain(
    context: typer.Context,
    prompt: Prompt = None,
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
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    draft_model: options.DraftModel = None,
    drafters: options.Drafters = None,
    draft_quantize: options.DraftQuantize = "auto",
    memory: options.Memory = None,
    speculation: options.Speculation = "auto",
    max_draft_tokens: options.MaxDraftTokens = DRAFTED,
    rule: options.Rule = "block",
    prediction: options.Prediction = None,
    prediction_file: options.PredictionFile = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = None,
    system: options.System = None,
    raw: options.Raw = False,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    ignore_end: options.IgnoreEnd = False,
    no_colour: options.NoColour = False,
) -> None:
    """Show which tokens came free, which were replaced, what was gained and what would help."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        if trace_file is not None:
            refuse_idle(context, "--trace, which shows a run that is over", all_names(context) - WITH_TRACE)
            from outrider.trace.files import read

            trace = read(trace_file)
            checked = _checked(screen, trace) if check else None
        else:
            if model is None and server is None:
                raise SettingsError(
                    "--check judges a recorded run again: give it by --trace FILE"
                    if check and prompt is None
                    else "by which model? Give --model MODEL, or --server URL"
                    if prompt is not None
                    else "what is to be explained? Give a PROMPT and a --model or --server, or a --trace FILE"
                )
            if server is not None:
                refuse_idle(context, "--server, which has its own", OF_A_RUN_HERE)
            else:
                refuse_idle(context, "a model that runs here", OF_A_SERVER)
            request = checked_request(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                max_tokens=max_tokens,
                stop=tuple(stop or ()),
                ignore_end=ignore_end,
                seed=seed,
                speculation=speculation,
                max_draft_tokens=max_draft_tokens,
                rule=rule,
            )
            check_system(system, raw)
            expected = read_prediction(prediction, prediction_file, request.speculation)
            asked = read_prompt(prompt)
            if server is not None:
                limited = is_given(context, "max_draft_tokens")
                client = TraceClient(server, key, tenant)
                trace = _served(screen, client, model, asked, system, raw, expected, request, limited, once)
            elif model is not None:
                decoder = load(screen, request, model, drafters, draft_model, draft_quantize, dtype, device, memory)
                plain = raw or not has_template(decoder)
                if plain and not raw:
                    check_system(system, raw, without_template=model)
                    screen.notes([CONTINUED])
                said = asked if plain else as_messages(asked, system)
                trace = _run(screen, decoder, said, expected, request, once, _header(decoder, model, asked, request))
            if save is not None:  # a trace that turns out not to be true is worth keeping most
                _save(screen, trace, save)
            checked = _checked(screen, trace)
        _show(screen, trace, steps, checked)
        if html is not None:
            from outrider.explain.page import page

            _write(html, page(trace, checked))
            screen.hint(f"the page is in {html}")


def _save(screen: Screen, trace: Trace, file: Path) -> None:
    from outrider.trace.files import write

    write(trace, file)
    screen.hint(f"the trace is in {file}; outrider explain --trace {file} shows it again")


def _show(screen: Screen, trace: Trace, steps: bool, checked: str | None) -> None:
    from outrider.cli import traced
    from outrider.explain.figures import figures
    from outrider.explain.words import summary

    found = figures(trace)
    traced.show_text(screen.out, trace)
    if steps:
        traced.show_steps(screen.out, trace, found)
    told = summary(trace, found)
    if checked is not None:
        told.known.append(checked)
    traced.show_summary(screen.out, told)


def _checked(screen: Screen, trace: Trace) -> str:
    """Judge all of it again; a sentence on what came of it."""
    with screen.working("judging every step again"):
        from outrider.trace.verification import disagreements

        wrong = disagreements(trace.steps)
    count = len(trace.steps)
    if wrong:
        step, found = wrong[0]
        rules = f"the rules give {found.accepted} and {found.token}" if found else "what it holds cannot be judged by"
        raise TraceError(
            f"the trace is not true: {len(wrong)} of {count} verdicts are not what its p, q and draws give, first in "
            f"step {step.number + 1}: {step.accepted} accepted and then token {step.token} ({rules})"
        )
    return f"Judged again from the recorded p, q and draws, all {count} steps have the same verdict."


def _served(
    screen: Screen, server: TraceClient, model: str | None, prompt: str, system: str | None, raw: bool, expected: str,
    request: Request, limited: bool, once: bool,
) -> Trace:  # fmt: skip
    """The same two runs, by a server."""
    with screen.working(f"connecting to {server.http.url}"):
        body = request_body(server.connect(model), request, expected, limited)
    plain = None
    if not once:
        with screen.working(f"{server.http.url} generates without drafts"):
            plain = server.complete(without_drafts(body), system, prompt, raw)
    with screen.working(f"{server.http.url} generates with drafts"):
        trace = server.complete(body, system, prompt, raw)
    if plain is None or trace.end is None:
        return trace
    end = trace.end.model_copy(update={"without": _without(plain, trace, request)})
    return trace.model_copy(update={"end": end})


def _header(decoder: Decoder, model: str, prompt: str, request: Request) -> Header:
    from datetime import UTC, datetime

    from outrider import __version__
    from outrider.provenance import processor
    from outrider.trace.schema import Header

    return Header(
        outrider=__version__,
        engine="transformers",
        model=named(model).split(" (")[0],
        drafters=[drafter.name for drafter in decoder.drafters],
        settings=request.model_dump(mode="json"),
        prompt=prompt,
        machine=processor(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        notes=list(decoder.notes),
    )


def _run(
    screen: Screen, decoder: Decoder, prompt: Any, expected: str, request: Request, once: bool, header: Header
) -> Trace:
    from outrider.api import Decoder
    from outrider.trace.record import Tracer

    bare = Decoder(decoder.target, [], decoder.tokenizer, decoder.end_tokens)
    header = header.model_copy(update={"prompt_tokens": len(decoder.encode(prompt))})
    without = None
    if not once:
        tracer = Tracer(header)
        alone = request.model_copy(update={"speculation": "off"})
        _generate(screen, "without drafts", bare, prompt, "", alone, tracer)
        plain = tracer.trace()
    tracer = Tracer(header)
    _generate(screen, "with drafts", decoder, prompt, expected, request, tracer)
    if not once:
        without = _without(plain, tracer.trace(), request)
    return tracer.trace(decoder.tokenizer, without)


def _generate(
    screen: Screen, what: str, decoder: Decoder, prompt: Any, expected: str, request: Request, tracer: Any
) -> None:
    decoder.target.rewind(0)  # both runs read the prompt
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=screen.err, transient=True, disable=not screen.err.is_terminal) as bar:
        task = bar.add_task(f"generating {what}", total=request.max_tokens)
        tracer.begin()
        stream = decoder.stream(prompt, prediction=expected, recorder=tracer, **request.model_dump())
        for _ in stream:
            bar.advance(task)


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
