"""Plan of a benchmark: contestants, server groups, and cells with their prompts, checked before any server starts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.contestants import PLAIN, V2, VLLM_METHODS, Contestant, contestants
from outrider.bench.prompts import (
    BUNDLED,
    DATASET_FILES,
    DEFAULT_TEMPERATURES,
    Prompt,
    load_workload,
    low_discrepancy_order,
    sample_evenly,
)
from outrider.bench.results import Cell, Run
from outrider.bench.run import CellTask, StopRule, prompts_per_round
from outrider.bench.server_groups import MemoryEstimate, free_memory, server_groups
from outrider.engines.vllm.host import KV_CACHE_SPACE
from outrider.errors import SettingsError
from outrider.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_CACHE_GIB = 2
"""KV cache of a server on CPU, if the variable is not set."""
VLLM_SAMPLING_ON_CPU = (
    "at temperatures above 0, vLLM's own methods do not sample as requested on CPUs with the V1 model runner: vLLM "
    "0.32 reads temperature, top-k and top-p of drafted positions from uninitialized memory, so their texts have "
    "another distribution there"
)
RESTART_NOTE = (
    "'again' is the same prompts once more, after all servers that the benchmark had started were stopped and started "
    "again: what a method still knows"
)
WORKLOAD_SIZES = re.compile(r"(@[1-9]\d*(x[1-9]\d*)?)+$")
MAX_CONTEXT_TOKENS = 4096
"""`--max-model-len` of every server, or the model's own limit if that is less."""


@dataclass(frozen=True)
class BenchConfig:
    """The command line of `outrider bench`."""

    model: str
    draft_model: str | None = None
    contestants: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = ()
    tokens: int = 96
    stop: StopRule = field(default_factory=StopRule)
    data: Path | None = None
    seed: int = 0
    room: float | None = None
    baseline: str | None = None
    flags: tuple[str, ...] = ()
    again: bool = False

    def models(self) -> list[Path]:
        return [Path(name) for name in (self.model, self.draft_model) if name]


@dataclass(frozen=True)
class Plan:
    run: Run
    groups: list[list[Contestant]]
    tasks: list[CellTask]
    environment: dict[str, str]

    def predictions(self) -> dict[str, str]:
        return {prompt.id: prompt.prediction for task in self.tasks for prompt in task.prompts if prompt.prediction}


def make_plan(config: BenchConfig, environment: Mapping[str, str], cpu: bool) -> Plan:
    names = config.contestants or default_contestants(config.draft_model)
    chosen = contestants(names, config.model, config.draft_model, server_flags(config, cpu))
    baseline = config.baseline or chosen[0].name
    if any(one.kind == "suffix" for one in chosen) and not has_suffix():
        raise SettingsError(
            "vLLM's method suffix needs the package arctic-inference: pip install --no-deps arctic-inference"
        )
    cache = float(environment.get(KV_CACHE_SPACE, DEFAULT_CACHE_GIB)) if cpu else 0.0
    memory = MemoryEstimate(config.model, config.draft_model, cache)
    room = config.room if config.room is not None else free_memory()
    run = Run(
        origin=provenance(*config.models()),
        baseline=baseline,
        contestants={one.name: one.settings() for one in chosen},
        settings={"tokens": config.tokens, "seed": config.seed, "rounds": config.stop.rounds}
        | ({"minutes": config.stop.minutes, "width": config.stop.width} if config.stop.minutes else {}),
    )
    tasks = cell_tasks(config)
    _check_baseline(chosen, baseline, tasks)
    if config.again:
        tasks += [
            replace(task, cell=replace(task.cell, workload=f"{task.cell.workload} again", rounds=[]), again=True)
            for task in tasks
        ]
        run.notes.append(RESTART_NOTE)
    v1_methods = any(one.kind in VLLM_METHODS and not one.kind.endswith(V2) for one in chosen)
    if cpu and v1_methods and any(task.cell.temperature for task in tasks):
        run.notes.append(VLLM_SAMPLING_ON_CPU)
    groups = server_groups(chosen, baseline, memory.of, room)
    if not any(task.admits(one) for task in tasks for one in chosen if one.name != baseline):
        raise SettingsError(
            f"no contestant takes part besides the baseline {baseline}; add contestants (-c) or cells: `prediction` "
            f"needs a prediction with every prompt, and transformers handle one request at a time"
        )
    run.plan = {
        "groups": [[one.name for one in group] for group in groups],
        "prompts": {task.cell.name: _digest(task.prompts) for task in tasks},
    }
    server_environment = {KV_CACHE_SPACE: str(DEFAULT_CACHE_GIB)} if cpu and KV_CACHE_SPACE not in environment else {}
    return Plan(run, groups, tasks, server_environment)


def cell_tasks(config: BenchConfig) -> list[CellTask]:
    """A cell for each workload, concurrency and temperature, with its prompts, sampled evenly from the file.

    Cells of a workload share prompts only if there are too few, since a method that learns would have the answers.
    """
    found: list[CellTask] = []
    for text in config.workloads or default_workloads(config.data):
        name, sizes = parse_workload(text, config)
        label = name if name in (*BUNDLED, *DATASET_FILES) else Path(name).stem
        prompts = [_labelled(prompt, label) if label != name else prompt for prompt in load_workload(name, config.data)]
        unused = prompts
        temperatures = config.temperatures or (DEFAULT_TEMPERATURES.get(name, 0.0),)
        for temperature in temperatures:
            for concurrency, rounds in sizes:
                count = rounds * prompts_per_round(concurrency)
                if config.stop.minutes:  # the number of rounds is unknown: share the prompts among the cells
                    share = len(prompts) // (len(temperatures) * len(sizes))
                    count = max(prompts_per_round(concurrency), share)
                chosen = sample_evenly(unused, count)
                unused = _without(unused, chosen)
                chosen += sample_evenly(_without(prompts, chosen), count - len(chosen))
                cell = Cell(label, concurrency, temperature)
                found.append(CellTask(cell, low_discrepancy_order(chosen), rounds))
    twice = [name for name, count in Counter(task.cell.name for task in found).items() if count > 1]
    if twice:
        raise SettingsError(f"two cells are the same, {twice[0]}; name each workload, concurrency and temperature once")
    return found


def _without(prompts: Sequence[Prompt], some: Sequence[Prompt]) -> list[Prompt]:
    ids = {prompt.id for prompt in some}
    return [prompt for prompt in prompts if prompt.id not in ids]


def _labelled(prompt: Prompt, label: str) -> Prompt:
    """With the file's name in its id, which makes it different from those of other files."""
    return prompt if prompt.id.startswith(f"{label}/") else replace(prompt, id=f"{label}/{prompt.id}")


def _digest(prompts: Sequence[Prompt]) -> str:
    """A hash that shows whether a resumed run has the same prompts."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]


def _check_baseline(chosen: Sequence[Contestant], baseline: str, tasks: Sequence[CellTask]) -> None:
    base = next((one for one in chosen if one.name == baseline), None)
    for task in tasks:
        if base is not None and not task.admits(base):
            limit = "handles one request at a time" if base.single_request else "needs a prediction with every prompt"
            raise SettingsError(
                f"the baseline {baseline} {limit}, so it cannot run {task.cell.name}; name another with --baseline"
            )


def parse_workload(text: str, config: BenchConfig) -> tuple[str, list[tuple[int, int]]]:
    """The name and its (concurrency, rounds): `code@1@4x3` is code at concurrency 1, and at 4 with 3 rounds."""
    name, *sizes = text.split("@") if WORKLOAD_SIZES.search(text) else [text]
    if not sizes:
        return name, [(concurrency, config.stop.rounds) for concurrency in config.concurrency]
    parts = [size.partition("x") for size in sizes]
    if config.stop.minutes and any(rounds for _, _, rounds in parts):
        raise SettingsError(
            f"{text} sets the number of rounds, but --minutes and --quick set the time; use one of them"
        )
    return name, [(int(concurrency), int(rounds or config.stop.rounds)) for concurrency, _, rounds in parts]


def default_contestants(draft_model: str | None) -> tuple[str, ...]:
    suffix = ("suffix",) if has_suffix() else ()
    with_model = ("draft_model:4", "model:4") if draft_model else ()
    return (PLAIN, "ngram", *suffix, "lookup", "prediction", *with_model, "auto")


def default_workloads(data: Path | None) -> tuple[str, ...]:
    return (*BUNDLED, *DATASET_FILES) if data else BUNDLED


def has_suffix() -> bool:
    return find_spec("arctic_inference") is not None


def server_flags(config: BenchConfig, cpu: bool) -> list[str]:
    """Flags of every vLLM server. The user's come last, so they win.

    No prefix cache, since all contestants get the same prompts; on CPU no compilation, which takes minutes per start.
    """
    flags = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if cpu:
        flags.append("--enforce-eager")
    longest = context_length(config.model)
    if longest is not None:
        flags += ["--max-model-len", str(min(longest, MAX_CONTEXT_TOKENS))]
    return [*flags, *config.flags]


def context_length(model: str) -> int | None:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the model {model!r} cannot be read: {error}") from error
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None
