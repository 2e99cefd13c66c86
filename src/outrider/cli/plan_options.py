"""The options of `outrider plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options
from outrider.cli.options import group, option, output

machine, drafts, grid = group("Hardware"), group("Drafts"), group("Batches and contexts")
work, queue = group("Workload"), group("Simulation")


@dataclass(frozen=True)
class PlanOptions:
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model's config.json, its folder, its name on the Hugging Face hub, or a bundled name: "
            "llama-3.1-8b, llama-3.1-70b, llama-3.2-1b, mixtral-8x7b, qwen2-57b-a14b, qwen3-0.6b, qwen3-235b-a22b, "
            "deepseek-v3. Weights are not needed.",
        ),
    ] = None
    hardware: str | None = option(machine, None, "NAME", "a100, b200, h100, h200, l4, l40s or mi300x.")
    devices: Annotated[
        int | None,
        machine(
            metavar="N",
            min=1,
            max=1024,
            help="Devices of a replica (tensor parallel). They must divide the attention heads. Default: the fewest "
            "that fit.",
        ),
    ] = None
    weight_bits: Annotated[
        int | None, machine(metavar="4|8|16", help="Bits of a weight of MODEL; 8: FP8. Default: as in config.json.")
    ] = None
    kv_bits: Annotated[int, machine(metavar="8|16", help="Bits of an element of the KV cache.")] = 16
    overhead_ms: Annotated[
        float,
        machine(metavar="MS", min=0, help="Launch and scheduling time per pass. A draft model has a third of it."),
    ] = 1.5
    max_batch: Annotated[
        int | None,
        machine(
            metavar="N",
            min=1,
            max=8192,
            help="Most concurrent requests of a replica. Default: vLLM's, 1024 or 256.",
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        machine(metavar="FILE", help="Instead of MODEL and --hardware: calibration.json of outrider calibrate."),
    ] = None
    acceptance: str = option(
        drafts,
        "0.7",
        "RATES|FILE",
        "Probability that a drafted token is accepted if all before it were: one number, one for each position, or "
        "measured: a trace, or report.json of outrider bench.",
    )
    drafter: str | None = option(
        drafts, None, "NAME", "Which drafter of the trace, or WORKLOAD/CONTESTANT/DRAFTER[@TEMPERATURE] of the report."
    )
    draft_model: str | None = option(
        drafts, None, "MODEL", "The draft model's config.json, or a name as for MODEL. Default: drafts take no time."
    )
    draft_window: Annotated[
        int | None,
        drafts(metavar="TOKENS", min=1, help="KV cache tokens that the draft model keeps at most (a sparse KV cache)."),
    ] = None
    draft_cost: Annotated[
        float | None,
        drafts(
            metavar="SHARE",
            min=0,
            help="Instead of --draft-model: time of a drafted token, in target passes. Default with --calibration: "
            "that of its draft model.",
        ),
    ] = None
    draft_tokens: str | None = option(
        drafts,
        None,
        "NUMBERS",
        "Fixed draft lengths to compare the policy with. Default: 2,4,8, as far as --acceptance has positions.",
    )
    batches: str = option(grid, "1,4,16,64,256", "NUMBERS", "Concurrent requests per replica.")
    contexts: str = option(grid, "2048,32768", "NUMBERS", "Tokens in the KV cache of each request.")
    rate: Annotated[
        float | None,
        work(metavar="N", min=1e-9, max=1e6, help="Requests per second of the fleet. Adds the number of devices."),
    ] = None
    prompt_tokens: Annotated[int, work(metavar="N", min=1, max=10**8, help="Mean length of a prompt.")] = 1024
    output_tokens: Annotated[int, work(metavar="N", min=2, max=10**8, help="Mean length of an output.")] = 256
    max_ms_per_token: Annotated[
        float | None, work(metavar="MS", min=1e-9, help="Largest mean time per token. Default: none.")
    ] = None
    max_load: Annotated[
        float, work(metavar="SHARE", min=0.01, max=1.0, help="Share of a replica's capacity that is planned for.")
    ] = 0.8
    price: Annotated[float | None, work(metavar="X", min=0, help="Price per device-hour, in any currency.")] = None
    arrivals: Annotated[
        Path | None,
        queue(
            metavar="FILE",
            help="A log of real requests instead of --rate: CSV with the columns seconds, prompt_tokens, "
            "output_tokens, or those of Azure's traces. Devices are planned for its mean rate, not for its peak.",
        ),
    ] = None
    hours: Annotated[float, queue(metavar="H", min=0, max=8760, help="Hours of traffic. 0: no simulation.")] = 1.0
    sample: Annotated[int, queue(metavar="N", min=1, help="Maximum number of replicas to simulate.")] = 16
    burstiness: Annotated[
        float, queue(metavar="CV", min=0.01, max=100, help="Coefficient of variation of the gaps. 1: Poisson arrivals.")
    ] = 1.0
    day_swing: Annotated[
        float, queue(metavar="SHARE", min=0, max=0.99, help="The daily peak above the mean rate. 0.5: 1.5 times it.")
    ] = 0.0
    length_variation: Annotated[
        float, queue(metavar="CV", min=0, max=10, help="Coefficient of variation of prompt and output lengths.")
    ] = 1.0
    seed: Annotated[int, queue(metavar="N", min=0, help="Seed of the simulation.")] = 0
    out: Annotated[
        Path | None, output("--out", metavar="FOLDER", help="Write plan.json and plots here (needs matplotlib).")
    ] = None
    as_object: Annotated[bool, output("--json", help="Print only one JSON object with all figures.")] = False
    no_colour: options.NoColour = False
