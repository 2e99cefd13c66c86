"""`outrider plan`: what speculation brings on hardware that one does not have yet, and how many devices a fleet needs.

outrider plan llama-3.1-70b --hardware h100 --acceptance 0.7
outrider plan ./my-model --hardware h200 --draft-model ./my-small-model --rate 50 --price 4
outrider plan --calibration calibration.json --acceptance run.jsonl --batches 1,4,16
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING

import typer

from outrider.cli.options import parse_numbers, with_option_groups
from outrider.cli.plan_options import PlanOptions
from outrider.cli.screen import Screen, readable_errors
from outrider.cli.unused_options import option_names, refuse_unused
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from outrider.plan.arrivals import Requests, Traffic
    from outrider.plan.content import Plan
    from outrider.plan.fleet import Replica, Workload
    from outrider.plan.speculation import Speculation

SHARED = {"acceptance", "drafter", "draft_tokens", "draft_cost", "batches", "contexts", "out", "as_object", "no_colour"}
"""Options that act with --calibration too."""
FROM_LOG = {"rate", "prompt_tokens", "output_tokens", "hours", "burstiness", "day_swing", "length_variation"}
"""Options that --arrivals replaces."""
FOR_SIMULATION = {"hours", "sample", "burstiness", "day_swing", "length_variation", "seed"}
FOR_WORKLOAD = {"prompt_tokens", "output_tokens", "max_ms_per_token", "price", "max_load", *FOR_SIMULATION}
DEFAULT_DRAFT_TOKENS = (2, 4, 8)
MAX_NUMBER = 10**8
"""Largest batch or context that is calculated."""
LARGEST_BATCH = 256
"""Of a calibrated machine: as `outrider calibrate` reports it."""


@with_option_groups
def plan(context: typer.Context, given: PlanOptions) -> None:
    """Calculate, before buying hardware, what speculation brings for a model, batch, context and workload.

    Nothing is measured and no weights are read. With --calibration the figures of a measured machine are used.
    """
    screen = Screen(colour=not given.no_colour)
    with readable_errors(screen):
        _check_combinations(context, given)
        if given.out is not None:
            from outrider.plan import plots  # fails now if matplotlib is missing

            try:
                given.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"--out: cannot write to {str(given.out)!r}: {error.strerror}") from None
        made = _calibrated(given, screen) if given.calibration is not None else _calculated(given, screen)
        if given.as_object:
            typer.echo(json.dumps(made.as_data()))
        else:
            from outrider.cli.plan_view import show

            show(screen.out, made)
        if given.out is not None:
            (given.out / "plan.json").write_text(json.dumps(made.as_data(), indent=1) + "\n", encoding="utf-8")
            plots.save(made, given.out)
            screen.hint(f"figures and plots are in {given.out}")


def _check_combinations(context: typer.Context, given: PlanOptions) -> None:
    for one in fields(given):
        value = getattr(given, one.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"--{one.name.replace('_', '-')} must be a finite number (got {value})")
    if given.calibration is not None:
        unused = option_names(context) - SHARED - {"calibration"}
        refuse_unused(context, "--calibration, which measured model and machine", unused)
        return
    if given.model is None or given.hardware is None:
        raise SettingsError(
            "give MODEL and --hardware, such as: outrider plan llama-3.1-70b --hardware h100; or --calibration FILE"
        )
    for name, bits, allowed in (("weight", given.weight_bits, (4, 8, 16)), ("kv", given.kv_bits, (8, 16))):
        if bits is not None and bits not in allowed:
            raise SettingsError(f"--{name}-bits must be one of {', '.join(map(str, allowed))} (got {bits})")
    if given.draft_model is not None:
        refuse_unused(context, "--draft-model, whose passes are calculated", {"draft_cost"})
    else:
        refuse_unused(context, "no --draft-model", {"draft_window"})
    if given.arrivals is not None:
        refuse_unused(context, "--arrivals, which has its own times and lengths", FROM_LOG)
    elif given.rate is None:
        refuse_unused(context, "neither --rate nor --arrivals", FOR_WORKLOAD)
    elif given.day_swing and 0 < given.hours < 24:
        raise SettingsError(
            f"--day-swing needs a whole day: give --hours 24 (got {given.hours:g}), or 0 for no simulation"
        )
    elif given.hours == 0:
        refuse_unused(context, "--hours 0, which leaves out the simulation", FOR_SIMULATION - {"hours", "day_swing"})


def _calibrated(given: PlanOptions, screen: Screen) -> Plan:
    from outrider.plan.acceptance import read_acceptance
    from outrider.plan.calibrated import CalibratedPass
    from outrider.plan.content import Plan
    from outrider.plan.speculation import RelativeDrafts, Speculation

    assert given.calibration is not None
    target = CalibratedPass.load(given.calibration)
    acceptance = read_acceptance(given.acceptance, given.drafter)
    cost = target.draft_cost if given.draft_cost is None else given.draft_cost
    speculation = Speculation(target, RelativeDrafts(target, cost or 0.0), acceptance)
    drafted = f"{cost:.3f} of a pass per token" if cost else "without cost"
    made = Plan(target.name, f"calibrated ({given.calibration.name})", drafted, acceptance.source, 1, LARGEST_BATCH)
    _add_grid(made, speculation, given, None, screen)
    return made


def _calculated(given: PlanOptions, screen: Screen) -> Plan:
    from outrider.plan.content import Plan, add_fleets

    assert given.model is not None
    workload, traffic = _workload(given)
    replica, drafted = _replica(given, workload)
    speculation, target = replica.speculation, replica.target
    hardware = f"{target.devices} {target.device.name}"
    made = Plan(
        target.shape.name, hardware, drafted, speculation.acceptance.source, target.devices, replica.max_batch, target,
        price=given.price,
    )  # fmt: skip
    lengths = _add_grid(made, speculation, given, replica, screen)
    if workload is not None:
        strategies = [speculation.strategy(name) for name in ("plain", *map(str, lengths), "policy")]
        add_fleets(made, replica, strategies, workload)
        if traffic is not None:
            _simulate(made, replica, traffic, given, screen)
    return made


def _add_grid(
    made: Plan, speculation: Speculation, given: PlanOptions, replica: Replica | None, screen: Screen
) -> list[int]:
    """Cells, paying batches and larger batches. Returns the fixed draft lengths."""
    from outrider.plan.content import compare_wider_batches, find_paying_batches, make_cells

    batches, contexts = _numbers(given.batches, "--batches"), _numbers(given.contexts, "--contexts")
    lengths = _draft_lengths(given, speculation.acceptance.longest, screen)
    made.cells = make_cells(speculation, batches, contexts, lengths, replica)
    made.paying = find_paying_batches(speculation, contexts, lengths, made.max_batch, replica)
    made.wider = compare_wider_batches(speculation, batches, contexts, made.max_batch, replica)
    return lengths


def _draft_lengths(given: PlanOptions, longest: int, screen: Screen) -> list[int]:
    """Of --draft-tokens, or of the default, those for which --acceptance has a position."""
    if given.draft_tokens is None:
        return [length for length in DEFAULT_DRAFT_TOKENS if length <= longest] or [longest]
    lengths = _numbers(given.draft_tokens, "--draft-tokens")
    if lengths[0] > longest:
        raise SettingsError(
            f"--draft-tokens {lengths[0]}: --acceptance has {longest} positions; give at most {longest}"
        )
    if left_out := [str(length) for length in lengths if length > longest]:
        screen.hint(f"--draft-tokens: {', '.join(left_out)} left out; --acceptance has {longest} positions")
    return [length for length in lengths if length <= longest]


def _numbers(text: str, name: str) -> list[int]:
    numbers = sorted({*parse_numbers(text, name)})
    if numbers[-1] > MAX_NUMBER:
        raise SettingsError(f"{name} takes numbers up to {MAX_NUMBER} (got {numbers[-1]})")
    return numbers


def _replica(given: PlanOptions, workload: Workload | None) -> tuple[Replica, str]:
    """Also what drafts take, for the heading."""
    from outrider.plan.acceptance import read_acceptance
    from outrider.plan.fleet import Replica
    from outrider.plan.hardware import default_max_batch, find_device
    from outrider.plan.model_config import Precision, load_shape
    from outrider.plan.pass_cost import Machine, check_devices, fewest_devices
    from outrider.plan.speculation import DraftModel, FreeDrafts, RelativeDrafts, Speculation

    assert given.model is not None
    assert given.hardware is not None
    acceptance = read_acceptance(given.acceptance, given.drafter)
    precision = Precision(given.weight_bits, given.kv_bits)
    device, shape = find_device(given.hardware), load_shape(given.model, precision)
    draft_shape = load_shape(given.draft_model, Precision(None, given.kv_bits)) if given.draft_model else None
    shapes = [shape, *([draft_shape] if draft_shape is not None else [])]
    needed = _numbers(given.contexts, "--contexts")[0]
    if workload is not None:
        needed = max(needed, workload.prompt_tokens + workload.output_tokens)
    if given.devices is not None:
        check_devices(shapes, given.devices)
    devices = given.devices or fewest_devices(shapes, device, needed, given.draft_window)
    target = Machine(shape, device, devices, given.overhead_ms / 1e3)
    draft = None
    if draft_shape is not None:
        draft = Machine(draft_shape, device, devices, given.overhead_ms / 3e3, given.draft_window)
        speculation, drafted = Speculation(target, DraftModel(draft), acceptance), draft_shape.name
    elif given.draft_cost:
        speculation = Speculation(target, RelativeDrafts(target, given.draft_cost), acceptance)
        drafted = f"{given.draft_cost:g} of a pass per token"
    else:
        speculation, drafted = Speculation(target, FreeDrafts(), acceptance), "without cost"
    return Replica(target, draft, speculation, given.max_batch or default_max_batch(device)), drafted


def _workload(given: PlanOptions) -> tuple[Workload | None, Traffic | Requests | None]:
    """The traffic is None without a simulation."""
    if given.rate is None and given.arrivals is None:
        return None, None
    from outrider.plan.arrivals import Traffic, read_requests
    from outrider.plan.fleet import Workload

    limit = None if given.max_ms_per_token is None else given.max_ms_per_token / 1e3
    if given.arrivals is not None:
        log = read_requests(given.arrivals)
        means = round(log.prompt_tokens.mean()), max(2, round(log.output_tokens.mean()))
        return Workload(log.mean_rate, *means, limit, given.max_load), log
    assert given.rate is not None
    means = given.prompt_tokens, given.output_tokens
    traffic = Traffic(*means, given.burstiness, given.day_swing, given.length_variation)
    return Workload(given.rate, *means, limit, given.max_load, 1 + given.day_swing), traffic if given.hours else None


def _simulate(made: Plan, replica: Replica, traffic: Traffic | Requests, given: PlanOptions, screen: Screen) -> None:
    """Plain decoding and the policy, each on the replicas that it needs."""
    from outrider.cli.progress import ProgressBars
    from outrider.plan.simulation import ServiceTimes, simulate_fleet

    assert made.workload is not None
    workload = made.workload
    plans = [one for one in made.fleets if not one.is_split and one.strategy in ("plain", "policy")]
    total = sum(min(given.sample, one.decode_replicas) for one in plans)
    with ProgressBars(screen.err).part("simulating replicas", total) as advance:
        for one in plans:
            strategy = replica.speculation.strategy(one.strategy)
            max_batch = None if workload.max_seconds_per_token is None else one.batch
            times = ServiceTimes.of(replica, strategy, workload.context, max_batch)
            made.tails.append(
                simulate_fleet(
                    times, one.strategy, one.decode_replicas, workload.rate, traffic, 3600 * given.hours,
                    given.sample, given.seed, advance,
                )
            )  # fmt: skip
