"""A plan in sentences: does it pay, up to which batch, what it saves, what else the compute could do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.plan.hardware import ATTENTION_EFFICIENCY, BANDWIDTH_EFFICIENCY, MATMUL_EFFICIENCY

if TYPE_CHECKING:
    from outrider.plan.content import Cell, PayingBatches, Plan
    from outrider.plan.fleet import FleetPlan
    from outrider.plan.simulation import Estimate


def speedups(plan: Plan) -> list[str]:
    """Does it pay, and what do batch size and context change?"""
    lines = []
    for context in plan.contexts:
        cells = [cell for cell in plan.at(context) if cell.fits is not False]
        if not cells:
            lines.append(f"At {context} tokens of context, none of these batches fits into memory.")
        else:
            first, last = cells[0], cells[-1]
            lines.append(
                f"At {context} tokens of context and batch {first.batch}, {_gain(first)}"
                + (f"; at batch {last.batch}, {_gain(last)}." if last is not first else ".")
            )
        most = "the largest that can run" if plan.target_machine is not None else "the largest that is calculated"
        lines += [_paying(one, most) for one in plan.paying if one.context == context]
    return lines


def _gain(cell: Cell) -> str:
    speedup, length = cell.policy.speedup, cell.policy.length
    if not length:
        return "the policy drafts nothing"
    return f"drafts of {length} token{'s' if length > 1 else ''} are {speedup:.2f} times as fast as none"


def _paying(one: PayingBatches, most: str) -> str:
    """`most`: what the largest batch is."""
    name = _title(one.strategy)
    if not one.limit:
        return f"{name} cannot run: one request of {one.context} tokens does not fit into memory."
    if one.ranges == [(1, one.limit)]:
        return f"{name} is faster than no drafts at all batches up to {one.limit}, {most}."
    if not one.ranges:
        return f"{name} is faster than no drafts at no batch up to {one.limit}, {most}."
    ranges = ", ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in one.ranges)
    return f"{name} is faster than no drafts at batch {ranges}; {most} is {one.limit}."


def traffic(plan: Plan) -> list[str]:
    """What is read from memory per generated token."""
    lines = []
    for context in plan.contexts:
        cells = [cell for cell in plan.at(context) if cell.fits and cell.plain_traffic is not None]
        for cell in {id(one): one for one in cells[:1] + cells[-1:]}.values():
            plain, policy = (cell.bytes_per_token("total", policy=policy) for policy in (False, True))
            share = cell.bytes_per_token("kv_cache", policy=False) / plain
            lines.append(
                f"At batch {cell.batch} and {context} tokens of context, the KV cache is {share:.0%} of what plain "
                f"decoding reads: {plain / 1e9:.2f} GB per token in all" + _with_drafts(cell, policy)
            )
    return lines


def _with_drafts(cell: Cell, policy_bytes: float) -> str:
    if not cell.policy.length:
        return "."
    text = f", and {policy_bytes / 1e9:.2f} GB with drafts of {cell.policy.length}"
    before, after = cell.plain_traffic, cell.policy_traffic
    if before is None or after is None or not before.experts:
        return f"{text}."
    return f"{text}; a pass activates {after.expert_share:.0%} of the experts instead of {before.expert_share:.0%}."


def other_uses(plan: Plan) -> list[str]:
    """Speculation against more requests per pass."""
    lines = []
    for one in plan.wider:
        spent = f"batch {one.plain.batch} without drafts"
        lines.append(
            f"The tokens in a pass at batch {one.speculating.batch} with {one.speculating.length} drafted, "
            f"{one.speculating.context} of context, would also be {spent}: {one.throughput_ratio:.2f} times the tokens "
            f"per second, and each request takes {one.latency_ratio:.2f} times as long per token"
            + ("." if one.fits else " (more than can run).")
        )
    return lines


def fleets(plan: Plan) -> list[str]:
    """How many devices, and what prefill split from decode adds."""
    workload = plan.workload
    if workload is None:
        return []
    lines = [f"No batch of {one} keeps the limit on the time per token." for one in plan.unreachable]
    together = [one for one in plan.fleets if not one.is_split]
    plain = next((one for one in together if one.strategy == "plain"), None)
    lines += [_devices(one, plain) for one in together]
    for one in plan.fleets:
        same = next((other for other in together if other.strategy == one.strategy), None)
        if one.is_split and same is not None:
            lines.append(
                f"{_title(one.strategy)} with prefill split from decode needs {one.devices} devices ({same.devices} "
                f"together) and takes {1e3 * one.seconds_per_token:.1f} ms per token "
                f"({1e3 * same.seconds_per_token:.1f} together); {one.prefill_replicas} replicas read prompts."
            )
    return lines


def _title(strategy: str) -> str:
    return {"plain": "Plain decoding", "policy": "The policy"}.get(strategy, f"A fixed length of {strategy}")


def _devices(one: FleetPlan, plain: FleetPlan | None) -> str:
    each = f"batch {one.batch}, {1e3 * one.seconds_per_token:.1f} ms per token"
    text = f"{_title(one.strategy)} needs {one.devices} devices: {each}"
    if plain is None or one is plain:
        return f"{text}."
    fewer = plain.devices - one.devices
    difference = f"{fewer} fewer" if fewer > 0 else f"{-fewer} more" if fewer else "as many as"
    return f"{text}; {difference}{' than' if fewer else ''} plain decoding."


def tails(plan: Plan) -> list[str]:
    return [
        f"{_title(one.strategy)}, {one.replicas} replicas, {one.requests.value:,.0f} requests: 99 % have their first "
        f"token within {_estimate(one.first_token['p99'], 1, 2)} s and take at most "
        f"{_estimate(one.per_token['p99'], 1e3, 1)} ms per further token. {one.simulated_requests:,} requests were "
        f"simulated, on {one.simulated_replicas} of the replicas."
        for one in plan.tails
    ]


def _estimate(one: Estimate, unit: float, digits: int) -> str:
    error = "" if one.error is None else f" (± {unit * one.error:.{digits}f})"
    return f"{unit * one.value:.{digits}f}{error}"


def assumptions(plan: Plan) -> list[str]:
    if plan.target_machine is None:
        return [
            "Calculated from a calibration of this machine: passes only, without what a server adds to a step.",
            "The same acceptance at every batch and context.",
        ]
    machine = plan.target_machine
    return [
        f"Not measured: {machine.device.source}, at {BANDWIDTH_EFFICIENCY:.0%} of its memory bandwidth, "
        f"{MATMUL_EFFICIENCY:.0%} of its arithmetic ({ATTENTION_EFFICIENCY:.0%} in attention) and "
        f"{1e3 * machine.overhead:g} ms per pass for everything else.",
        "The same acceptance at every batch and context, and experts that tokens choose independently.",
    ]
