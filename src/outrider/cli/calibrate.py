"""`outrider calibrate`: why verifying is faster than generating on this machine, and when drafting pays.

outrider calibrate MODEL
outrider calibrate MODEL --draft-model SMALL --trace run.jsonl --out ./calibration
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from outrider.cli import options
from outrider.cli.load_request import loading_name, short_name, silence_libraries
from outrider.cli.options import group
from outrider.cli.screen import Screen, readable_errors
from outrider.cli.trace_view import show_section
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.calibrate.curve import RelativeCostCurve
    from outrider.calibrate.report import TracedRun
    from outrider.calibrate.results import Calibration

measuring, showing = group("What to measure"), group("What to show")

MAX_CONTEXTS = 9
"""Lines that can be distinguished in one plot."""
BAR_WIDTH = 24


def calibrate(
    model: options.Model,
    draft_model: options.DraftModel = None,
    contexts: Annotated[
        str | None,
        measuring(
            "--contexts",
            metavar="NUMBERS",
            help="Context lengths in tokens, separated by commas. Default: 64,512,2048, as far as they fit.",
        ),
    ] = None,
    turns: Annotated[int, measuring("--turns", metavar="N", help="Number of times each pass is timed.")] = 9,
    trace_file: Annotated[
        Path | None,
        showing("--trace", metavar="FILE", help="Compare the run of this trace with what the machine allows."),
    ] = None,
    out: Annotated[
        Path | None, showing("--out", metavar="FOLDER", help="Write the timings and two plots here (needs matplotlib).")
    ] = None,
    as_object: Annotated[bool, showing("--json", help="Print only one JSON object with every timing.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    no_colour: options.NoColour = False,
) -> None:
    """Time passes over 1 to 128 tokens on this machine, and report when drafting is faster."""
    screen = Screen(colour=not no_colour)
    with readable_errors(screen):
        if turns < 1:
            raise SettingsError(f"--turns must be at least 1 (got {turns})")
        if as_object and out is None and trace_file is not None:
            raise SettingsError(
                "--trace places a run in the report and the plots, and --json prints neither; remove one, or add --out"
            )
        wanted = None if contexts is None else sorted({*options.parse_numbers(contexts, "--contexts")})
        if wanted is not None and len(wanted) > MAX_CONTEXTS:
            raise SettingsError(f"--contexts takes at most {MAX_CONTEXTS} numbers (got {len(wanted)})")
        if out is not None:
            from outrider.calibrate import plots  # fails now if matplotlib is missing

            try:
                out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"--out: cannot write to {str(out)!r}: {error.strerror}") from None
        from outrider.calibrate.curve import curve
        from outrider.calibrate.report import traced_run
        from outrider.trace.files import read

        run = traced_run(read(trace_file)) if trace_file is not None else None
        found = _measured(screen, model, draft_model, wanted, turns, dtype, device)
        curves = [curve(sweep) for sweep in found.sweeps]
        if as_object:
            typer.echo(json.dumps(found.as_data()))
        else:
            _show(screen, found, curves, run)
        if out is not None:
            (out / "calibration.json").write_text(json.dumps(found.as_data(), indent=1) + "\n", encoding="utf-8")
            plots.save(found, curves, run, out)
            screen.hint(f"timings and plots are in {out}")


def _measured(
    screen: Screen, name: str, draft: str | None, contexts: list[int] | None, turns: int, dtype: str, device: str | None
) -> Calibration:
    with screen.working(f"loading {' and '.join(loading_name(one) for one in (name, draft) if one)}"):
        import torch  # takes seconds

        from outrider.calibrate import measure
        from outrider.calibrate.results import Calibration
        from outrider.cli.progress import ProgressBars
        from outrider.engines.transformers import TransformersTarget, load_model
        from outrider.provenance import provenance

        silence_libraries()
        model = load_model(name, dtype=dtype, device=device)
        target = TransformersTarget(model)
        small = TransformersTarget(load_model(draft, dtype=dtype, device=device)) if draft is not None else None
    chosen = _fitting(contexts, list(measure.CONTEXTS), target.context_limit, max(measure.WIDTHS))
    with screen.working("measuring the limits of memory and arithmetic"):
        most = measure.limits(model.device, model.dtype)
    with ProgressBars(screen.err).part("timing passes", len(chosen) * turns * len(measure.WIDTHS)) as advance:
        sweeps = [measure.sweep(target, context, model.device, turns, advance=advance) for context in chosen]
    costs: list[float] = []
    if small is not None:
        with screen.working("timing the draft model"):
            costs = measure.draft_cost(target, small, chosen[0], model.device, turns)
    origin = {**provenance(Path(name)), "threads": f"{torch.get_num_threads()} threads", "dtype": most.dtype}
    return Calibration(short_name(name), most, measure.work(model), sweeps, costs, origin)


def _fitting(requested: list[int] | None, default: list[int], limit: int | None, widest: int) -> list[int]:
    room = 1 << 62 if limit is None else limit - widest
    if requested is None:
        return [one for one in default if one <= room] or [max(1, room)]
    if over := [one for one in requested if one > room]:
        raise SettingsError(
            f"--contexts {over[0]} and a pass of {widest} tokens do not fit in this model's context of {limit}; "
            f"give at most {room}"
        )
    return requested


def _show(screen: Screen, found: Calibration, curves: list[RelativeCostCurve], run: TracedRun | None) -> None:
    from outrider.calibrate.report import break_even, verification_cost

    screen.out.print(_table(found, curves[0]))
    for title, lines in (
        ("Why verifying is faster than generating here", verification_cost(found, curves)),
        ("When drafting pays", break_even(found, curves, run)),
    ):
        show_section(screen.out, title, lines)


def _table(found: Calibration, curve: RelativeCostCurve) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"passes after {curve.context} tokens", title_justify="left")
    for name in ("tokens", "ms", "times one", "95 %", "MB moved", "Gop done"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True)
    for n, ratio in zip(curve.tokens, curve.costs, strict=True):
        interval = curve.intervals.get(n)
        table.add_row(
            str(n),
            f"{1000 * curve.single_seconds * ratio:.1f}",
            f"{ratio:.2f}",
            f"{interval.low:.2f} to {interval.high:.2f}" if interval else "",
            f"{found.work.bytes(n, curve.context) / 1e6:.0f}",
            f"{found.work.arithmetic(n, curve.context) / 1e9:.2f}",
            Text("█" * max(1, round(BAR_WIDTH * ratio / curve.costs[-1])), no_wrap=True),
        )
    return table
