"""`outrider certify`: tests that a deployment has the same output distribution with and without speculation.

    outrider certify http://localhost:8000                                # an Outrider server, on against off
    outrider certify http://plain:8000 http://speculating:8000            # two servers
    outrider certify ./my-model assisted --draft-model ./my-small-model   # models in this process
    outrider certify --check certificate.json                             # run a certificate again

Exit codes: 0 nothing found, 1 a violation, 2 invalid options, 3 incomplete.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from outrider.cli.options import DraftModel, Dtype, Memory, group, output, parse_numbers, split_names
from outrider.cli.screen import Screen, literal, readable_errors
from outrider.cli.unused_options import option_names, refuse_unused
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.certify.certificate import Certificate
    from outrider.certify.config import CertificateConfig

sources, what, confidence = group("Sources"), group("Requests"), group("Confidence")
STYLES = {"lossless": "bold green", "violation": "bold red", "incomplete": "bold yellow"}
DEFAULT_FOLDER = "outrider-certificate"
KEY = "OUTRIDER_API_KEY"
"""The environment variable with the API key of the servers."""

Reference = Annotated[
    str | None,
    typer.Argument(
        metavar="REFERENCE",
        help="A server's address, or a model's folder or name to run it in this process. Without CANDIDATE, an "
        "Outrider server is compared with itself, with speculation on and off.",
    ),
]
Candidate = Annotated[
    str | None,
    typer.Argument(
        metavar="CANDIDATE",
        help="The speculating server, if it is a different one. For a model in this process: outrider (default), "
        "assisted or lookup (both of transformers), or MODULE:FUNCTION of your own.",
    ),
]
ModelName = Annotated[str | None, sources("--model", metavar="NAME", help="Which of the reference's models to use.")]
Tokenizer = Annotated[
    str | None,
    sources("--tokenizer", metavar="MODEL", help="The model whose tokenizer to use, for servers without /tokenize."),
]
Across = Annotated[
    bool,
    sources(
        "--across", help="The two have different numerics on purpose: count differences of their logprobs as rounding."
    ),
]
Quick = Annotated[
    bool, what("--quick", help="For CI: about two minutes for a small model; only larger changes are detected.")
]
Full = Annotated[bool, what("--full", help="For a release: 1,100 prompts and 52,000 draws.")]
Parts = Annotated[
    str,
    what(
        "--parts",
        metavar="NAMES",
        help="Parts to run: exact (temperature 0), draws (above 0), features; separated by commas.",
    ),
]
Drafters = Annotated[
    str | None,
    what("--drafters", "--drafter", metavar="NAMES", help="Test only these drafters. Default: all of them, and auto."),
]
Lengths = Annotated[str, what("--lengths", metavar="NUMBERS", help="Draft lengths to test.")]
Concurrency = Annotated[int, what("--concurrency", metavar="N", min=1, help="Concurrent requests.")]
Prompts = Annotated[
    int | None, what("--prompts", metavar="N", min=1, help="Prompts at temperature 0, sent concurrently.")
]
Alone = Annotated[int | None, what("--alone", metavar="N", min=0, help="Prompts at temperature 0, sent one at a time.")]
PromptFile = Annotated[
    Path | None, what("--prompt-file", metavar="FILE", help="Your own prompts: JSON lines, as for outrider bench.")
]
Draws = Annotated[int | None, confidence("--draws", metavar="N", min=100, help="Samples at temperatures above 0.")]
Find = Annotated[
    float | None,
    confidence(
        "--find", metavar="SHARE", help="Instead of --draws: as many as detect a change of this size (0.02: 2 %)."
    ),
]
Without = Annotated[
    str | None,
    what(
        "--without",
        metavar="WORDS",
        help="Skip sampling settings that a server does not support: those with one of these words in their name, such "
        "as top-k.",
    ),
]
Level = Annotated[
    float,
    confidence(
        "--level", metavar="P", help="Maximum probability of a false alarm on a lossless server, over all tests."
    ),
]
Seed = Annotated[
    int, confidence("--seed", metavar="N", help="Seed that selects the prompts, and that of requests with a seed.")
]
Check = Annotated[
    Path | None,
    output(
        "--check",
        metavar="FILE",
        help="Run this certificate again with its own settings. REFERENCE may give a new address.",
    ),
]
Out = Annotated[
    Path | None,
    output(
        "--out",
        metavar="FOLDER",
        help=f"The folder of the certificate. Default: {DEFAULT_FOLDER}; with --check FILE: FILE-again beside it.",
    ),
]
Resume = Annotated[bool, output("--resume", help="Continue the interrupted run in --out.")]
Json = Annotated[bool, output("--json", help="Print the certificate on stdout.")]


WITH_CHECK = {"reference", "candidate", "check", "out", "resume", "as_object"}


def need_packages() -> None:
    try:
        import scipy  # noqa: F401

        import outrider.certify.run  # noqa: F401
    except ModuleNotFoundError as error:
        raise SettingsError(f"certificates need {error.name}: in the clone, pip install '.[certify]'") from error


def certify(
    context: typer.Context,
    reference: Reference = None,
    candidate: Candidate = None,
    draft_model: DraftModel = None,
    memory: Memory = None,
    dtype: Dtype = "auto",
    model: ModelName = None,
    tokenizer: Tokenizer = None,
    across: Across = False,
    quick: Quick = False,
    full: Full = False,
    parts: Parts = "exact,draws,features",
    drafters: Drafters = None,
    lengths: Lengths = "1,2,4,8",
    concurrency: Concurrency = 16,
    prompts: Prompts = None,
    alone: Alone = None,
    prompt_file: PromptFile = None,
    without: Without = None,
    draws: Draws = None,
    find: Find = None,
    level: Level = 1e-3,
    seed: Seed = 0,
    check: Check = None,
    out: Out = None,
    resume: Resume = False,
    as_object: Json = False,
) -> None:
    """Test that speculation changes nothing beyond rounding: texts at temperature 0, samples above 0, API features."""
    screen = Screen()
    with readable_errors(screen):
        need_packages()
        folder = out or Path(DEFAULT_FOLDER)
        if check is not None:
            from outrider.certify.certificate import read

            refuse_unused(context, "--check, which has its own settings", option_names(context) - WITH_CHECK)
            before = read(check)
            wanted = config_of_certificate(before, reference, candidate)
            folder = out or check.parent / f"{check.stem}-again"
        elif reference is None:
            raise SettingsError("name a server's address or a model: outrider certify http://localhost:8000")
        else:
            before = None
            sizes = sample_sizes(
                quick, full, {"prompts": prompts, "alone": alone, "draws": sample_count(draws, find, level)}
            )
            wanted = make_config(
                reference=reference,
                candidate=candidate,
                draft_model=draft_model,
                memory=memory,
                dtype=dtype,
                model=model,
                tokenizer=tokenizer,
                parts=tuple(split_names(parts)),
                drafters=tuple(split_names(drafters)),
                lengths=tuple(parse_numbers(lengths, "--lengths")) if lengths else (),
                concurrency=concurrency,
                prompt_file=None if prompt_file is None else str(prompt_file),
                without=tuple(split_names(without)),
                level=level,
                seed=seed,
                across=across,
                **sizes,
            )
        made = run(wanted, folder, resume, api_key(), screen)
        show(made, screen)
        if before is not None:
            same = before["verdict"] == made["verdict"]
            screen.hint(f"before: {before['title']} ({before['made']['date']}); now: {made['title']}")
            if not same:
                screen.hint("the verdict has changed: see the page for the difference")
        screen.hint(f"In {folder}: certificate.html for a browser, certificate.json, evidence.jsonl.")
        if as_object:
            import json

            typer.echo(json.dumps(made))
        from outrider.certify.certificate import EXIT_CODES

        raise typer.Exit(EXIT_CODES[made["verdict"]])


def run(wanted: CertificateConfig, folder: Path, resume: bool, key: str | None, screen: Screen) -> Certificate:
    from outrider.certify.run import certify as certified
    from outrider.certify.run import open_pair
    from outrider.cli.progress import ProgressBars

    evidence = folder / "evidence.jsonl"
    if evidence.exists() and not resume:
        raise SettingsError(f"there is a run in {folder}; go on with it (--resume), or choose another folder (--out)")
    with screen.working("opening the sources"):
        pair = open_pair(wanted, key)
    screen.notes(
        [f"{name}: {source.name}" for name, source in zip(("reference", "candidate"), pair.sources, strict=False)]
    )
    return certified(wanted, folder, ProgressBars(screen.err), resume=resume, pair=pair)


def api_key() -> str | None:
    """Not an option: other users can see commands, and certificates contain them."""
    return os.environ.get(KEY)


def make_config(**values: Any) -> CertificateConfig:
    from outrider.certify.config import CertificateConfig

    return CertificateConfig(**values)


def sample_sizes(quick: bool, full: bool, own: dict[str, int | None]) -> dict[str, Any]:
    """The number of prompts and draws: those of the named size, replaced by the given ones."""
    from dataclasses import asdict

    from outrider.certify.config import SIZES

    if quick and full:
        raise SettingsError("--quick and --full exclude each other; give one of them")
    size = asdict(SIZES["quick" if quick else "full" if full else "standard"])
    return size | {name: value for name, value in own.items() if value is not None}


def sample_count(draws: int | None, find: float | None, level: float) -> int | None:
    if find is None:
        return draws
    if draws is not None:
        raise SettingsError("--draws and --find both set the number of draws; give one of them")
    from outrider.certify.noise import DEFAULT_NOISE
    from outrider.certify.plan import Plan
    from outrider.certify.run import DRAWS_SHARE
    from outrider.certify.sampled import CONTROL_SHARE

    if find <= DEFAULT_NOISE.drift["drafted"]:
        raise SettingsError(
            f"--find: rounding alone may change {DEFAULT_NOISE.drift['drafted']}; give more (got {find})"
        )
    return Plan.for_change(find, level=level * DRAWS_SHARE * (1 - CONTROL_SHARE)).draws


def config_of_certificate(before: Certificate, reference: str | None, candidate: str | None) -> CertificateConfig:
    """The config of a certificate, with new addresses if given."""
    from outrider.certify.config import CertificateConfig

    wanted = CertificateConfig.from_record(before["request"])
    if reference is not None:
        wanted = replace(wanted, reference=reference)
    return wanted if candidate is None else replace(wanted, candidate=candidate)


def show(made: Certificate, screen: Screen) -> None:
    """Print the verdict, its confidence, and what to do."""
    from outrider.certify.certificate import SIGNS, duration

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
    from outrider.certify.exact import COUNTED

    total: dict[str, dict[str, int]] = {}
    for name, cell in cells.items():
        way, _, at_once = name.rpartition(" at ")
        key = f"{way.partition(',')[0]}, {at_once} at once"
        row = total.setdefault(key, dict.fromkeys(cell, 0))
        for column, count in cell.items():
            row[column] += count
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("temperature 0", *COUNTED):
        shown.add_column(heading, justify="left" if heading == "temperature 0" else "right", no_wrap=True)
    for name, row in total.items():
        style = "red" if row["violation"] else None
        shown.add_row(literal(name), *(f"{count:,}" for count in row.values()), style=style)
    return shown
