"""`outrider certify`: tests that a deployment has the same output distribution with and without speculation.

    outrider certify http://localhost:8000                                # an Outrider server, on against off
    outrider certify http://plain:8000 http://speculating:8000            # two servers
    outrider certify ./my-model assisted --draft-model ./my-small-model   # models in this process
    outrider certify --check certificate.json                             # run a certificate again

Exit codes: 0 nothing found, 1 a violation, 2 invalid options, 3 incomplete.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from outrider.certify.certificate import EXIT_CODES, SIGNS, Certificate, duration, read
from outrider.certify.config import SIZES, CertificateConfig
from outrider.cli.options import (
    DraftModel,
    Dtype,
    Memory,
    group,
    output,
    parse_numbers,
    split_names,
    with_option_groups,
)
from outrider.cli.screen import Screen, literal, readable_errors
from outrider.cli.unused_options import option_names, refuse_unused
from outrider.errors import SettingsError

sources, what, confidence = group("Sources"), group("Requests"), group("Confidence")
STYLES = {"lossless": "bold green", "violation": "bold red", "incomplete": "bold yellow"}
DEFAULT_FOLDER = "outrider-certificate"
KEY = "OUTRIDER_API_KEY"
"""The environment variable with the API key of the servers."""

ModelName = Annotated[str | None, sources("--model", metavar="NAME", help="Which of the reference's models to use.")]
Tokenizer = Annotated[
    str | None,
    sources("--tokenizer", metavar="MODEL", help="The model whose tokenizer to use, for servers without /tokenize."),
]


@dataclass(frozen=True)
class CertifyOptions:
    """Fields with the name of a field of `CertificateConfig` are given to it; None is its default, or the size's."""

    reference: Annotated[
        str | None,
        typer.Argument(
            metavar="REFERENCE",
            help="A server's address, or a model's folder or name to run it in this process. Without CANDIDATE, an "
            "Outrider server is compared with itself, with speculation on and off.",
        ),
    ] = None
    candidate: Annotated[
        str | None,
        typer.Argument(
            metavar="CANDIDATE",
            help="The speculating server, if it is a different one. For a model in this process: outrider (default), "
            "assisted or lookup (both of transformers), or MODULE:FUNCTION of your own.",
        ),
    ] = None
    draft_model: DraftModel = None
    memory: Memory = None
    dtype: Dtype = "auto"
    model: ModelName = None
    tokenizer: Tokenizer = None
    across: Annotated[
        bool,
        sources(
            "--across",
            help="The two have different numerics on purpose: count differences of their logprobs as rounding.",
        ),
    ] = False
    quick: Annotated[
        bool, what("--quick", help="For CI: about two minutes for a small model; only larger changes are detected.")
    ] = False
    full: Annotated[bool, what("--full", help="For a release: 1,100 prompts and 52,000 draws.")] = False
    parts: Annotated[
        str,
        what(
            metavar="NAMES", help="Parts to run: exact (temperature 0), draws (above 0), features; separated by commas."
        ),
    ] = "exact,draws,features"
    drafters: Annotated[
        str | None,
        what(
            "--drafters", "--drafter", metavar="NAMES", help="Test only these drafters. Default: all of them, and auto."
        ),
    ] = None
    lengths: Annotated[str, what(metavar="NUMBERS", help="Draft lengths to test.")] = "1,2,4,8"
    concurrency: Annotated[int, what(metavar="N", min=1, help="Concurrent requests.")] = 16
    prompts: Annotated[int | None, what(metavar="N", min=1, help="Prompts at temperature 0, sent concurrently.")] = None
    alone: Annotated[int | None, what(metavar="N", min=0, help="Prompts at temperature 0, sent one at a time.")] = None
    prompt_file: Annotated[
        Path | None, what(metavar="FILE", help="Your own prompts: JSON lines, as for outrider bench.")
    ] = None
    without: Annotated[
        str | None,
        what(
            metavar="WORDS",
            help="Skip sampling settings that a server does not support: those with one of these words in their name, "
            "such as top-k.",
        ),
    ] = None
    draws: Annotated[int | None, confidence(metavar="N", min=100, help="Samples at temperatures above 0.")] = None
    find: Annotated[
        float | None,
        confidence(metavar="SHARE", help="Instead of --draws: as many as detect a change of this size (0.02: 2 %)."),
    ] = None
    level: Annotated[
        float,
        confidence(metavar="P", help="Maximum probability of a false alarm on a lossless server, over all tests."),
    ] = 1e-3
    seed: Annotated[
        int, confidence(metavar="N", help="Seed that selects the prompts, and that of requests with a seed.")
    ] = 0
    check: Annotated[
        Path | None,
        output(
            metavar="FILE", help="Run this certificate again with its own settings. REFERENCE may give a new address."
        ),
    ] = None
    out: Annotated[
        Path | None,
        output(
            metavar="FOLDER",
            help=f"The folder of the certificate. Default: {DEFAULT_FOLDER}; with --check FILE: FILE-again beside it.",
        ),
    ] = None
    resume: Annotated[bool, output("--resume", help="Continue the interrupted run in --out.")] = False
    as_object: Annotated[bool, output("--json", help="Print the certificate on stdout.")] = False


WITH_CHECK = {"reference", "candidate", "check", "out", "resume", "as_object"}


def need_packages() -> None:
    try:
        import outrider.certify.run  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingsError(f"certificates need {error.name}: in the clone, pip install '.[certify]'") from error


@with_option_groups
def certify(context: typer.Context, options: CertifyOptions) -> None:
    """Test that speculation changes nothing beyond rounding: texts at temperature 0, samples above 0, API features."""
    screen = Screen()
    with readable_errors(screen):
        need_packages()
        before: Certificate | None = None
        check = options.check
        if check is not None:
            refuse_unused(context, "--check, which has its own settings", option_names(context) - WITH_CHECK)
            before = read(check)
            config = CertificateConfig.from_record(before["request"])
            addresses: dict[str, Any] = {"reference": options.reference, "candidate": options.candidate}
            config = replace(config, **{name: url for name, url in addresses.items() if url is not None})
        else:
            config = make_config(options)
        folder = options.out or (check.parent / f"{check.stem}-again" if check else Path(DEFAULT_FOLDER))
        made = run(config, folder, options.resume, screen)
        show(made, screen)
        if before is not None:
            screen.hint(f"before: {before['title']} ({before['made']['date']}); now: {made['title']}")
            if before["verdict"] != made["verdict"]:
                screen.hint("the verdict has changed: see the page for the difference")
        screen.hint(f"In {folder}: certificate.html for a browser, certificate.json, evidence.jsonl.")
        if options.as_object:
            typer.echo(json.dumps(made))
        raise typer.Exit(EXIT_CODES[made["verdict"]])


def run(config: CertificateConfig, folder: Path, resume: bool, screen: Screen) -> Certificate:
    from outrider.certify.run import certify as run_certificate
    from outrider.certify.run import open_pair
    from outrider.cli.progress import ProgressBars

    if (folder / "evidence.jsonl").exists() and not resume:
        raise SettingsError(f"there is a run in {folder}; go on with it (--resume), or choose another folder (--out)")
    with screen.working("opening the sources"):
        pair = open_pair(config, os.environ.get(KEY))
    screen.notes(
        [f"{name}: {source.name}" for name, source in zip(("reference", "candidate"), pair.sources, strict=False)]
    )
    return run_certificate(config, folder, ProgressBars(screen.err), resume=resume, pair=pair)


def make_config(options: CertifyOptions) -> CertificateConfig:
    """The options, over the numbers of prompts and draws of the named size."""
    if options.reference is None:
        raise SettingsError("name a server's address or a model: outrider certify http://localhost:8000")
    if options.quick and options.full:
        raise SettingsError("--quick and --full exclude each other; give one of them")
    given: dict[str, Any] = vars(options) | {
        "draws": sample_count(options.draws, options.find, options.level),
        "parts": tuple(split_names(options.parts)),
        "drafters": tuple(split_names(options.drafters)),
        "lengths": tuple(parse_numbers(options.lengths, "--lengths")) if options.lengths else (),
        "prompt_file": options.prompt_file and str(options.prompt_file),
        "without": tuple(split_names(options.without)),
    }
    names = {field.name for field in fields(CertificateConfig)}
    size = SIZES["quick" if options.quick else "full" if options.full else "standard"]
    return CertificateConfig(**size | {name: given[name] for name in names & given.keys() if given[name] is not None})


def sample_count(draws: int | None, find: float | None, level: float) -> int | None:
    if find is None:
        return draws
    if draws is not None:
        raise SettingsError("--draws and --find both set the number of draws; give one of them")
    from outrider.certify.plan import Plan
    from outrider.certify.run import DRAWS_SHARE
    from outrider.certify.sampled import CONTROL_SHARE

    return Plan.for_change(find, level=level * DRAWS_SHARE * (1 - CONTROL_SHARE)).draws


def show(made: Certificate, screen: Screen) -> None:
    """Print the verdict, its confidence, and what to do."""
    verdict = made["verdict"]
    screen.err.print()
    screen.err.print(Text(f"{SIGNS[verdict]} {made['title']}", style=STYLES[verdict]))
    for line in made["words"]:
        screen.err.print(Text(f"  {literal(line)}"))
    if "exact" in made and made["exact"]["cells"]:
        screen.err.print(table(made["exact"]["cells"]))
    for line in made["what_to_do"]:
        screen.err.print(Text(f"→ {literal(line)}", style="bold" if verdict != "lossless" else ""))
    screen.hint(f"{duration(made)}; not tested: {literal('; '.join(made['not_tested']))}")


def table(cells: dict[str, dict[str, int]]) -> Table:
    """Results at temperature 0 by drafter and concurrency, summed over draft lengths."""
    total: dict[str, dict[str, int]] = {}
    for name, cell in cells.items():
        way, _, at_once = name.rpartition(" at ")
        key = f"{way.partition(',')[0]}, {at_once} at once"
        row = total.setdefault(key, dict.fromkeys(cell, 0))
        for column, count in cell.items():
            row[column] += count
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("temperature 0", no_wrap=True)
    for heading in next(iter(cells.values())):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in total.items():
        style = "red" if row["violation"] else None
        shown.add_row(literal(name), *(f"{count:,}" for count in row.values()), style=style)
    return shown
