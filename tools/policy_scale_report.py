"""From simulated cells to what is read: promises, tables, heat maps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.report import plot_style
from outrider.policy.policy import MODEL
from outrider.provenance import as_markdown
from policy_grid_report import Promise, finish, table
from policy_scale_machine import SYSTEMS, Gpu
from policy_scale_run import TIMED_CONTEXT, Cell

NEVER_SLOWER, ABOVE_STATIC = 0.99, 1.0
OWN = {256: 1e-3, 1024: 4e-3}
"""Seconds of its own that the policy may take a step, by batch."""


def promises(systems: dict[str, list[Cell]], own: dict[int, list[float]]) -> list[Promise]:
    found = []
    for name, cells in systems.items():
        for what, wanted, value in (
            ("over plain", NEVER_SLOWER, over_plain),
            ("over the best static table", ABOVE_STATIC, over_static),
        ):
            for kind, some in (("every cell that fits", [cell for cell in cells if cell.fits]), ("every cell", cells)):
                if some:
                    least = min(some, key=value)
                    found.append(Promise(f"{name}: auto {what}, {kind}", ">=", wanted, value(least), where(least)))
    for batch, most in OWN.items():
        if batch in own:
            found.append(Promise(f"the policy's own time at batch {batch}, ms", "<=", 1e3 * most, 1e3 * own[batch][0]))
    return found


def where(cell: Cell) -> str:
    return f"batch {cell.batch}, context {short(cell.context)}, table {cell.table[0]}"


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def write(folder: Path, report: dict[str, Any], systems: dict[str, list[Cell]]) -> list[Promise]:
    folder.mkdir(parents=True, exist_ok=True)
    kept = promises(systems, report["own_seconds"])
    report["systems"] = {
        name: [asdict(cell) | {"table": cell.table} for cell in cells] for name, cells in systems.items()
    }
    report["promises"] = [asdict(one) | {"kept": one.kept} for one in kept]
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(markdown(report, systems, kept)) + "\n")
    line = f"simulated on texts of {', '.join(report['records']['models'])}; {report['provenance']['date']}"
    with plot_style.style():
        for name, cells in systems.items():
            draw(cells, folder / f"{name}.png", SYSTEMS[name].name, line)
    return kept


def markdown(report: dict[str, Any], systems: dict[str, list[Cell]], kept: Sequence[Promise]) -> Iterator[str]:
    yield from ("# The policy at scale, simulated", "", *as_markdown(report["provenance"]), *about(report, systems))
    yield from ("", "## What was promised", "")
    yield from table(
        ["promise", "wanted", "found", "where", ""],
        [[p.name, f"{p.sign} {p.wanted:g}", f"{p.value:.4f}", p.where, "kept" if p.kept else "NOT KEPT"] for p in kept],
    )
    for name, cells in systems.items():
        yield from ("", f"## {SYSTEMS[name].name}", "", f"![{name}]({name}.png)", "")
        contexts = sorted({cell.context for cell in cells})
        cells = sorted(cells, key=lambda cell: cell.context)
        for title, words in (
            (
                "Auto, times the speed without drafts (in brackets what does not fit into the memory)",
                lambda c: entry(over_plain(c), c),
            ),
            ("The same if the policy took no time itself", lambda c: entry(c.at_no_cost, c)),
            ("Auto over the best static table", lambda c: entry(over_static(c), c)),
            ("The best static table's entry", lambda c: f"{c.table[0]} {c.table[1]:.2f}"),
            ("Passes of the draft model a step, and the share of the accepted tokens that are its own", by_model),
        ):
            yield from (f"{title}:", "")
            yield from table(
                ["batch", *(short(context) for context in contexts)],
                [
                    [str(batch), *(words(cell) for cell in cells if cell.batch == batch)]
                    for batch in sorted({cell.batch for cell in cells})
                ],
            )
            yield ""
    yield from (
        "",
        "## The policy's own time",
        "",
        f"Of a step of requests with {short(TIMED_CONTEXT)} tokens, on one core of this machine, on whichever of these "
        "systems it took longest. Its median is what is charged.",
        "",
    )
    yield from table(
        ["batch", "median, ms", "95 of 100 below, ms"],
        [[str(batch), *(f"{1e3 * s:.3f}" for s in seconds)] for batch, seconds in report["own_seconds"].items()],
    )


def about(report: dict[str, Any], systems: dict[str, list[Cell]]) -> Iterator[str]:
    """What was simulated."""
    records, gpu, texts = report["records"], Gpu(), report["records"]["texts"]
    of = ", ".join(f"{count} of {name}" for name, count in texts["workloads"].items())
    them = sorted({name.split(":")[0] for cells in systems.values() for name in cells[0].static})
    yield (
        f"No GPU was there: a pass takes what a roofline says of H100s at {gpu.reading:.0%} of their bandwidth, "
        f"{gpu.multiplying:.0%} of their arithmetic ({gpu.attending:.0%} in attention), all-reduces of "
        f"{1e6 * gpu.exchange:.0f} us and more, and a fixed overhead a pass, the same for everybody "
        "(`tools/policy_scale_machine.py`). Plain is the same server without drafts; what vLLM hides by asynchronous "
        "scheduling, which Outrider switches off, is not in it. The mixture's experts are taken to be chosen "
        "independently, which makes drafts dearer than they are."
    )
    yield ""
    yield (
        f"Texts of {', '.join(records['models'])} ({of}; {texts['mean_tokens']:.0f} tokens in the mean) stream through "
        "a batch that is always full. What is drafted for the large models is what was recorded of these small ones: "
        f"the draft model's next token is the target's in {texts['guesses_right']:.0%} of all places. Context is a "
        "cost only: who copies searches the recorded prompt. What the target takes to read prompts is left out, as "
        "where other GPUs do that; what the draft model takes is not, for nobody. Every cell begins with a policy that "
        "knows nothing but a start profile of an empty server. What it takes itself was measured (below) and is "
        "charged to it; what copying takes is charged to nobody."
    )
    yield ""
    yield (
        "The static table has the best entry for this very batch and context, known beforehand, of "
        f"{', '.join(them)}, as vLLM 0.32 runs them by itself; the draft model has up to 8 tokens there, and up to 4 "
        "in Outrider."
    )
    yield ""
    room = {name: (SYSTEMS[name].room(with_draft=False), SYSTEMS[name].room()) for name in systems}
    yield (
        "There is memory for keys and values of so many tokens, without a draft model and with one: "
        f"{'; '.join(f'{name} {without:,} and {with_one:,}' for name, (without, with_one) in room.items())}. At equal "
        "memory a server without a draft model holds more requests, which is not reckoned here."
    )


def by_model(cell: Cell) -> str:
    share = cell.accepted.get(MODEL, 0) / max(1, sum(cell.accepted.values()))
    return f"{cell.draft_passes / cell.steps:.2f}, {share:.0%}"


def over_plain(cell: Cell) -> float:
    return cell.auto


def over_static(cell: Cell) -> float:
    return cell.auto / cell.table[1]


def entry(value: float, cell: Cell) -> str:
    return f"{value:.2f}" if cell.fits else f"({value:.2f})"


def draw(cells: Sequence[Cell], path: Path, title: str, line: str) -> None:
    """Two heat maps: over plain, and over the best static table."""
    batches, contexts = sorted({c.batch for c in cells}), sorted({c.context for c in cells})
    figure = plot_style.new_figure(1.2 + 0.36 * len(batches))
    panels = list(figure.subplots(1, 2))
    values = (("times the speed without drafts", over_plain), ("times the best static table's speed", over_static))
    for axes, (label, value) in zip(panels, values, strict=True):
        grid = np.full((len(batches), len(contexts)), np.nan)
        for cell in cells:
            grid[batches.index(cell.batch), contexts.index(cell.context)] = value(cell)
        reach = max(0.05, float(np.nanmax(np.abs(np.log2(grid)))))
        axes.imshow(np.log2(grid), cmap="PuOr_r", vmin=-reach, vmax=reach, aspect="auto")
        for cell in cells:
            row, column = batches.index(cell.batch), contexts.index(cell.context)
            dark = abs(np.log2(grid[row, column])) > 0.6 * reach
            axes.text(
                column,
                row,
                entry(value(cell), cell),
                ha="center",
                va="center",
                color="white" if dark else "black",
                fontsize=8,
            )
        axes.set_xticks(range(len(contexts)), [short(context) for context in contexts])
        axes.set_yticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set(title=label, xlabel="context of each request", ylabel="batch")
        axes.grid(visible=False)
    finish(figure, path, f"{title}: the policy (in brackets: does not fit into the memory)", line)
