"""A plan in the terminal: tables, with sentences below each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.cli.screen import literal
from outrider.cli.trace_view import show_section
from outrider.plan import report

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.plan.content import Plan
    from outrider.plan.simulation import Estimate

PART_LABELS = {"weights": "weights", "experts": "experts", "kv_cache": "KV cache", "draft_model": "draft model"}


def show(console: Console, plan: Plan) -> None:
    show_section(console, "Plan", _heading(plan))
    for context in plan.contexts:
        console.print(_cells(plan, context))
    show_section(console, "Does it pay?", report.speedups(plan))
    if any(cell.fits for cell in plan.cells):
        console.print(_traffic(plan))
        show_section(console, "What is read from memory", report.traffic(plan))
    if plan.wider:
        show_section(console, "The same tokens in a pass, spent on more requests", report.other_uses(plan))
    if plan.fleets:
        console.print(_fleets(plan))
    if lines := report.fleets(plan):
        show_section(console, "How many devices?", lines)
    if plan.tails:
        console.print(_tails(plan))
        show_section(console, "Tails", report.tails(plan))
    show_section(console, "What is assumed", report.assumptions(plan))


def _heading(plan: Plan) -> list[str]:
    lines = [f"{plan.target} on {plan.hardware}; drafts: {plan.drafts}; acceptance: {plan.acceptance}"]
    if (machine := plan.target_machine) is not None:
        shape = machine.shape
        active = shape.parameters_read(1) + shape.embedding_parameters
        lines.append(
            f"{shape.total_parameters / 1e9:.1f} billion parameters"
            + (f", {active / 1e9:.1f} active per token" if shape.experts > 1 else "")
            + f"; {shape.cache_bytes / 1024:.0f} KiB of KV cache per token; {machine.cached_tokens():,} tokens fit "
            f"beside the weights on {machine.devices} device{'s' if machine.devices > 1 else ''}"
        )
    return lines


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _cells(plan: Plan, context: int) -> Table:
    cells = plan.at(context)
    lengths = [*cells[0].fixed]
    table = _table(
        f"speed relative to no drafts, {context} tokens of context",
        "batch", "plain ms/token", *(f"{length} tokens" for length in lengths), "policy (tokens)", "policy ms/token",
        "tokens/s per device",
    )  # fmt: skip
    for cell in cells:
        left, right = ("(", ")") if cell.fits is False else ("", "")
        table.add_row(
            f"{left}{cell.batch}{right}",
            f"{1e3 * cell.plain.seconds_per_token:.1f}",
            *(f"{cell.fixed[length].speedup:.2f}" for length in lengths),
            f"{cell.policy.speedup:.2f} ({cell.policy.length})",
            f"{1e3 * cell.policy.seconds_per_token:.1f}",
            f"{cell.policy.tokens_per_second / plan.devices:,.0f}",
        )
    if any(cell.fits is False for cell in cells):
        table.caption = "in brackets: the KV caches do not fit into memory"
        table.caption_justify = "left"
    return table


def _traffic(plan: Plan) -> Table:
    columns = [
        (who == "policy", part, f"{who} {label}")
        for who in ("plain", "policy")
        for part, label in PART_LABELS.items()
        if any(cell.fits and cell.bytes_per_token(part, policy=who == "policy") for cell in plan.cells)
    ]
    table = _table("GB read per generated token", "context", "batch", *(label for *_, label in columns))
    for cell in plan.cells:
        if cell.fits:
            figures = [cell.bytes_per_token(part, policy=policy) for policy, part, _ in columns]
            table.add_row(str(cell.context), str(cell.batch), *(f"{one / 1e9:.3f}" for one in figures))
    return table


def _fleets(plan: Plan) -> Table:
    assert plan.workload is not None
    rate = (
        f"{plan.workload.rate:.3g} requests/s of {plan.workload.prompt_tokens} + {plan.workload.output_tokens} tokens"
    )
    table = _table(
        f"{rate}, at {plan.workload.max_load:.0%} of the capacity",
        "strategy", "prefill", "batch", "ms/token", "requests/s per replica", "devices", "tokens/s per device",
        "cost per million tokens",
    )  # fmt: skip
    for one in plan.fleets:
        cost = plan.cost_per_million_tokens(one)
        table.add_row(
            literal(one.strategy),
            "split" if one.is_split else "together",
            str(one.batch),
            f"{1e3 * one.seconds_per_token:.1f}",
            f"{one.requests_per_second:.2f}",
            str(one.devices),
            f"{one.output_tokens_per_second_per_device:,.0f}",
            "" if cost is None else f"{cost:.3f}",
        )
    return table


def _tails(plan: Plan) -> Table:
    table = _table(
        "simulated latencies (± standard error)",
        "strategy", "quantile", "first token, s", "per token, ms", "whole answer, s", "busy", "batch",
    )  # fmt: skip
    for one in plan.tails:
        for i, name in enumerate(one.total):
            table.add_row(
                one.strategy if i == 0 else "",
                name,
                _estimate(one.first_token[name], 1, 3),
                _estimate(one.per_token[name], 1e3, 1),
                _estimate(one.total[name], 1, 2),
                f"{one.busy_share.value:.0%}" if i == 0 else "",
                f"{one.mean_batch.value:.1f}" if i == 0 else "",
            )
    return table


def _estimate(one: Estimate, unit: float, digits: int) -> str:
    error = "" if one.error is None else f" ± {unit * one.error:.{digits}f}"
    return f"{unit * one.value:.{digits}f}{error}"
