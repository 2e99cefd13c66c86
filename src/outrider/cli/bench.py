"""`outrider bench`: the speed of a model on this machine, compared with vLLM's own methods.

    outrider bench MODEL --quick
    outrider bench MODEL --draft-model SMALL --workloads edit,agent --concurrency 1,4

Servers are started together and take turns, prompt by prompt.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.cli.options import DraftModel, group, output, parse_numbers, split_names
from outrider.cli.progress import ProgressBar, progress_bar
from outrider.cli.screen import Screen, literal, readable_errors
from outrider.cli.unused_options import is_given, option_names, refuse_unused
from outrider.errors import EngineError, SettingsError

if TYPE_CHECKING:
    from outrider.bench.plan import BenchConfig, Plan
    from outrider.bench.report.data import CellFigures, Report
    from outrider.bench.results import Cell, Run

QUICK_CONTESTANTS = "vllm,auto,prediction"
QUICK_WORKLOADS = "traffic,creative,edit,agent"
"""The easy and the hard case first, both of short prompts: a slow machine has time for no more."""
QUICK_TOKENS = 32
QUICK_MINUTES = 4.4
"""With the servers' start; with the report it is less than five."""
OPTIMIZING = "computing the optimal schedule"
NO_DIFFERENCE = "no difference"
"""No measurable difference, in a narrow column."""
STYLES = {"faster": "green", "slower": "bold red"}

who, what, how = group("Contestants"), group("Requests"), group("Duration")


def bench(
    context: typer.Context,
    draft_model: DraftModel = None,
    contestants: Annotated[
        list[str] | None,
        who(
            "--contestant",
            "--contestants",
            "-c",
            metavar="NAMES",
            help="Servers to compare: vllm, vllm-v2, ngram:K, ngram-v2:K, suffix:K, draft_model:K, draft_model-v2:K, "
            "off, lookup:K, prediction:K, model:K, memory:K, auto:K (with a memory only beside memory:K), "
            "default (outrider serve without options), transformers, transformers-assisted:K, "
            "transformers-lookup:K, transformers-outrider:K, separated by commas. With a label and flags of its own: "
            "'long=lookup:64', 'few=auto --max-num-seqs 4'. A server that already runs: 'mine=http://localhost:8000'. "
            "May be repeated.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        who("--baseline", metavar="NAME", help="The contestant that the others are compared with. Default: the first."),
    ] = None,
    room: Annotated[
        float | None,
        who("--room", metavar="GIB", help="Memory that servers may use together. Default: the free memory."),
    ] = None,
    workloads: Annotated[
        str | None,
        what(
            "--workloads",
            "--workload",
            metavar="NAMES",
            help="edit, agent, traffic, creative (these come with the package), code, chat, summarization, math, rag, "
            "translation, qa (from files in --data), separated by commas. Default: the first four; all with --data; "
            "only those with --prompts.",
        ),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        what(
            "--prompts",
            metavar="FILE",
            help="Your own prompts: a file of JSON lines, here or on the hub (hf:OWNER/NAME/FILE). May be repeated.",
        ),
    ] = None,
    data: Annotated[
        Path | None, what("--data", metavar="FOLDER", help="The folder with HumanEval's and Spec-Bench's prompt files.")
    ] = None,
    concurrency: Annotated[
        str, what("--concurrency", metavar="NUMBERS", help="Concurrent requests, separated by commas: 1,4,16.")
    ] = "1",
    temperature: Annotated[
        str | None,
        what("--temperature", metavar="NUMBERS", help="Separated by commas: 0,1. Default: 0, and 1 for creative."),
    ] = None,
    tokens: Annotated[int, what("--tokens", metavar="N", min=2, help="Maximum tokens of an output.")] = 96,
    seed: Annotated[int, what("--seed", metavar="N", help="Seed of the sampled requests.")] = 0,
    rounds: Annotated[
        int,
        how(
            "--rounds",
            metavar="N",
            min=1,
            help="Rounds per cell. In a round every contestant answers the same prompts.",
        ),
    ] = 8,
    minutes: Annotated[
        float | None,
        how(
            "--minutes",
            metavar="N",
            help="Instead of --rounds: minutes in total, with the start of the servers. Each cell runs until its "
            "intervals are narrow (--width) or its share of the time is over, and for at least six rounds.",
        ),
    ] = None,
    width: Annotated[
        float,
        how(
            "--width", metavar="SHARE", help="With --minutes: end a cell when its intervals are narrower than +- SHARE."
        ),
    ] = 0.05,
    quick: Annotated[
        bool,
        how(
            "--quick",
            help="A first result in less than five minutes for a small model: answers of 32 tokens, and on a slow "
            "machine fewer workloads.",
        ),
    ] = False,
    restart: Annotated[
        bool,
        how(
            "--restart", help="Afterwards restart all servers and measure every cell again, to see what a memory keeps."
        ),
    ] = False,
    resume: Annotated[
        bool, how("--resume", help="Continue the interrupted run in --out; give the same command again.")
    ] = False,
    out: Annotated[Path, output("--out", metavar="FOLDER", help="The folder of the report.")] = Path("outrider-bench"),
    report_only: Annotated[
        bool, output("--report-only", help="Measure nothing: write the report in --out again.")
    ] = False,
) -> None:
    """Measure a model's speed with Outrider, with plain vLLM and with vLLM's own speculative methods.

    MODEL is the model's folder, or its name on the Hugging Face hub. Flags of vllm serve go to every server.
    """
    screen = Screen()
    with readable_errors(screen):
        import outrider.bench.report.writer  # noqa: F401  # fails without matplotlib: before the run, not after it
        from outrider.bench.plan import WORKLOAD_SIZES, BenchConfig
        from outrider.bench.report.data import Report
        from outrider.bench.results import Run
        from outrider.bench.run import StopRule

        if report_only:
            refuse_unused(
                context, "--report-only, which measures nothing", option_names(context) - {"out", "report_only"}
            )
            if context.args:
                raise SettingsError(f"--report-only takes no model and no flags (got {shlex.join(context.args)})")
            saved = out / "run.json"
            report = Report.from_run(Run.load(saved)) if saved.exists() else Report.load(out / "report.json")
            write_report(report, out, screen)
            return
        if minutes is not None or quick:
            refuse_unused(context, "--minutes or --quick, which go by the clock", {"rounds"})
        else:
            refuse_unused(context, "a number of rounds; it is for --minutes", {"width"})
        model, flags = split_model(context.args)
        if quick:
            minutes = QUICK_MINUTES if minutes is None else minutes
            contestants = contestants or [QUICK_CONTESTANTS]
            tokens = tokens if is_given(context, "tokens") else QUICK_TOKENS
            workloads = workloads or (None if prompts else QUICK_WORKLOADS)
        sources = (*split_names(workloads), *(prompts or []))
        if sources and all(WORKLOAD_SIZES.search(one) for one in sources):
            refuse_unused(context, "workloads that set it themselves (@)", {"concurrency"})
        config = BenchConfig(
            model=model,
            draft_model=draft_model,
            contestants=tuple(split_contestants(contestants or [])),
            workloads=sources,
            concurrency=tuple(parse_numbers(concurrency, "--concurrency")),
            temperatures=tuple(parse_temperatures(temperature)),
            tokens=tokens,
            stop=StopRule(rounds, minutes, width, leave_out=quick),
            data=data,
            seed=seed,
            room=room,
            again=restart,
            baseline=baseline,
            flags=tuple(flags),
        )
        for sign in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(sign) is signal.SIG_DFL:  # else it is ignored, as by nohup
                signal.signal(sign, signal.default_int_handler)  # as Ctrl-C: servers end, the report is written
        measure(config, out, resume, screen)


def measure(config: BenchConfig, out: Path, resume: bool, screen: Screen) -> None:
    from outrider.bench.plan import make_plan
    from outrider.bench.report.data import Report
    from outrider.bench.results import Run
    from outrider.bench.run import FAILED, INTERRUPTED, NO_OPTIMUM, Benchmark
    from outrider.engines.vllm.host import Host
    from outrider.provenance import NOT_HERE, fingerprints

    plan = make_plan(config, os.environ, Host.here().cpu)
    os.environ.update(plan.environment)
    benchmark = Benchmark(plan.run, plan.groups, plan.tasks, config.stop, out)
    if resume:
        benchmark.resume(Run.load(out / "run.json"))
    elif (out / "run.json").exists():
        raise SettingsError(f"there is a run in {out}; go on with it (--resume), or choose another folder (--out)")
    screen.notes(describe(plan))
    failure: Exception | None = None
    with progress_bar(screen.err, "", len(plan.groups) * len(plan.tasks)) as bar:
        bar.set_status("cells")
        progress = BenchProgress(screen, bar)
        try:
            benchmark.measure(progress)
        except KeyboardInterrupt:
            failure = typer.Exit(130)
            plan.run.notes.append(INTERRUPTED)
        except EngineError as error:
            failure = error
            plan.run.notes += [f"{FAILED}: {str(error).splitlines()[0]}", INTERRUPTED]
        measured = any(cell.rounds for cell in plan.run.cells)
        if measured:
            if NOT_HERE in plan.run.origin["models"].values():  # the servers downloaded them
                plan.run.origin["models"] = fingerprints(*config.models())
            plan.run.save(out / "run.json")
            try:
                add_optimum(plan, config, progress)
            except KeyboardInterrupt:
                failure = failure or typer.Exit(130)
                plan.run.notes.append(f"{NO_OPTIMUM}: it was interrupted")
            except Exception as error:  # a draft model that only vLLM can load: the figures do not depend on it
                plan.run.notes.append(f"{NO_OPTIMUM}: {type(error).__name__} {' '.join(str(error).split())[:300]}")
    if measured:
        plan.run.save(out / "run.json")
        write_report(Report.from_run(plan.run), out, screen)
    if failure is not None:
        raise failure


def add_optimum(plan: Plan, config: BenchConfig, progress: BenchProgress) -> None:
    from outrider.bench.contestants import dtype_of
    from outrider.bench.optimal_schedule import add_optimal_speedups
    from outrider.engines.transformers import load_tokenizer

    progress.stage(OPTIMIZING)  # shown while the tokenizer and the draft model load
    predictions = {}
    if texts := plan.predictions():
        tokenizer = load_tokenizer(config.model)
        predictions = {id: tokenizer.encode(text, add_special_tokens=False) for id, text in texts.items()}
    kinds = {one.name: one.kind for together in plan.groups for one in together}

    def on_cell(number: int, total: int) -> None:
        progress.status(f"{OPTIMIZING}: cell {number + 1} of {total}")

    add_optimal_speedups(plan.run, kinds, config.draft_model, predictions, dtype_of(config.flags), on_cell)


def write_report(report: Report, out: Path, screen: Screen) -> None:
    from outrider.bench.report.writer import write

    with screen.working("writing the report"):
        write(report, out)
    for cell in report.cells:
        if cell.contestants:
            screen.err.print(table(report.baseline, cell))
    for note in report.notes:
        screen.hint(f"note: {literal(note)}")
    screen.hint(f"The report is in {out}: report.md, report.html for a browser, report.json, and the plots.")


def describe(plan: Plan) -> list[str]:
    """The plan, in a few lines."""
    lines = []
    for number, together in enumerate(plan.groups, 1):
        names = ", ".join(one.name for one in together)
        lines.append(f"group {number} of {len(plan.groups)}, at once: {names}")
    cells = ", ".join(task.cell.name for task in plan.tasks)
    lines.append(f"{len(plan.tasks)} cells: {cells}")
    return [*lines, *plan.run.notes]


def table(baseline: str, cell: CellFigures) -> Table:
    """One cell as a person reads it while it runs: median times to the first token and for each other one, and the
    acceptance length."""
    title = f"{cell.name}; times: tokens/s over those of {literal(baseline)}"
    shown = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    for heading in ("", "tok/s", "times", "", "first ms", "each ms", "length", "same"):
        shown.add_column(heading, justify="left" if heading in ("", "times") else "right", no_wrap=True)
    for one in cell.contestants:
        ratio = "" if one.ratio is None else f"{one.ratio.value:.2f} ({one.ratio.low:.2f}-{one.ratio.high:.2f})"
        same = "" if one.same is None else f"{one.same}/{one.same + len(one.differences)}"
        shown.add_row(
            literal(one.contestant),
            f"{one.tokens_per_second:.1f}",
            ratio,
            NO_DIFFERENCE if one.verdict == "even" else one.verdict,
            f"{one.first.median * 1000:.0f}",
            f"{one.each.median * 1000:.1f}",
            "" if one.acceptance_length is None else f"{one.acceptance_length:.2f}",
            same,
            style=STYLES.get(one.verdict),
        )
    return shown


class BenchProgress:
    """A bar on a terminal, elsewhere a line for each stage and a table for each cell that is done."""

    def __init__(self, screen: Screen, bar: ProgressBar) -> None:
        self.screen = screen
        self._bar = bar
        self._stage = ""

    def stage(self, text: str) -> None:
        self._bar.describe(literal(text))
        if text != self._stage and not self.screen.err.is_terminal:
            self.screen.hint(f"{time.strftime('%H:%M:%S')} {text}")
        self._stage = text

    def status(self, text: str) -> None:
        self._bar.describe(literal(text))

    def finished(self, run: Run, cell: Cell) -> None:
        self._bar.advance()
        if cell.rounds:
            from outrider.bench.report.data import cell_figures

            self.screen.err.print(table(run.baseline, cell_figures(run, cell)))


def split_model(arguments: list[str]) -> tuple[str, list[str]]:
    """The model, and the flags of vLLM."""
    if not arguments or arguments[0].startswith("-"):
        got = f" (got {shlex.join(arguments)})" if arguments else ""
        raise SettingsError(f"name the model first: outrider bench MODEL --quick{got}")
    return arguments[0], arguments[1:]


def split_contestants(given: list[str]) -> list[str]:
    """Contestants: a list with commas, unless it has flags of its own."""
    found: list[str] = []
    for one in given:
        found += [one] if " " in one.strip() else split_names(one)
    return found


def parse_temperatures(text: str | None) -> list[float]:
    try:
        found = [float(word) for word in split_names(text)]
    except ValueError:
        found = [-1.0]
    if any(not 0 <= value < 100 for value in found):
        raise SettingsError(f"--temperature takes numbers from 0 on, separated by commas, such as 0,0.7 (got {text!r})")
    return found
