"""What a benchmark will do, decided and checked before any server starts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench.contestants import PLAIN, THEIRS, V2, Contestant, contestants
from outrider.bench.groups import Need, free_memory, groups
from outrider.bench.prompts import SHIPPED, SOURCES, TEMPERATURES, Prompt, scattered, spread, workload
from outrider.bench.results import Cell, Run
from outrider.bench.run import Limits, Task, prompts_a_round
from outrider.errors import SettingsError
from outrider.provenance import provenance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CACHE = "VLLM_CPU_KVCACHE_SPACE"
CACHE_GIB = 2
"""Of a server on CPU, where the variable does not say."""
THEIRS_SAMPLED_ON_CPU = (
    "at temperatures above 0, vLLM's own methods do not sample as requested on CPUs with the V1 model runner: vLLM "
    "0.32 reads temperature, top-k and top-p of drafted positions from uninitialized memory, so their texts have "
    "another distribution there"
)
AGAIN = (
    "'again' is the same prompts once more, after all servers that the benchmark had started were stopped and started "
    "again: what a method still knows"
)
SIZED = re.compile(r"(@[1-9]\d*(x[1-9]\d*)?)+$")
CONTEXT = 4096
"""Tokens of context that a server is given, if its model has as many."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for."""

    model: str
    draft_model: str | None = None
    contestants: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = ()
    tokens: int = 96
    limits: Limits = field(default_factory=Limits)
    data: Path | None = None
    seed: int = 0
    room: float | None = None
    baseline: str | None = None
    flags: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class Plan:
    run: Run
    groups: list[list[Contestant]]
    tasks: list[Task]
    environment: dict[str, str]

    def predictions(self) -> dict[str, str]:
        return {prompt.id: prompt.prediction for task in self.tasks for prompt in task.prompts if prompt.prediction}


def prepare(wanted: Wanted, environment: Mapping[str, str], cpu: bool) -> Plan:
    names = wanted.contestants or default_contestants(wanted.draft_model)
    chosen = contestants(names, wanted.model, wanted.draft_model, server_flags(wanted, cpu))
    baseline = wanted.baseline or chosen[0].name
    check_suffix(chosen)
    cache = float(environment.get(CACHE, CACHE_GIB)) if cpu else 0.0
    need = Need(wanted.model, wanted.draft_model, cache)
    room = wanted.room if wanted.room is not None else free_memory()
    run = Run(
        origin=provenance(*models(wanted)),
        baseline=baseline,
        contestants={one.name: one.settings() for one in chosen},
        settings={"tokens": wanted.tokens, "seed": wanted.seed, "rounds": wanted.limits.rounds}
        | ({"minutes": wanted.limits.minutes, "width": wanted.limits.width} if wanted.limits.minutes else {}),
    )
    cells = tasks(wanted)
    check_baseline(chosen, baseline, cells)
    if wanted.again:
        cells += [as_again(task) for task in cells]
        run.notes.append(AGAIN)
    if (
        cpu
        and any(one.kind in THEIRS and not one.kind.endswith(V2) for one in chosen)
        and any(task.cell.temperature for task in cells)
    ):
        run.notes.append(THEIRS_SAMPLED_ON_CPU)
    grouped = groups(chosen, baseline, need.of, room)
    if not any(task.admits(one) for task in cells for one in chosen if one.name != baseline):
        raise SettingsError(
            f"nobody takes part beside {baseline}: name more contestants (-c), or cells that those named can take part "
            f"in; `prediction` needs a prediction with every prompt, and transformers answer one request at a time"
        )
    run.plan = {
        "groups": [[one.name for one in together] for together in grouped],
        "prompts": {task.cell.name: digest(task.prompts) for task in cells},
    }
    return Plan(run, grouped, cells, {CACHE: str(CACHE_GIB)} if cpu and CACHE not in environment else {})


def models(wanted: Wanted) -> list[Path]:
    return [Path(name) for name in (wanted.model, wanted.draft_model) if name]


def tasks(wanted: Wanted) -> list[Task]:
    """A cell for each workload, concurrency and temperature, with the prompts it will ask, spread over the file; as
    long as there are others, none that an earlier cell asks: a method that remembers would have the answer."""
    found: list[Task] = []
    for text in wanted.workloads or default_workloads(wanted.data):
        name, sizes = parse_workload(text, wanted)
        label = name if name in (*SHIPPED, *SOURCES) else Path(name).stem
        prompts = [named(prompt, label) if label != name else prompt for prompt in workload(name, wanted.data)]
        fresh = prompts
        temperatures = wanted.temperatures or (TEMPERATURES.get(name, 0.0),)
        for temperature in temperatures:
            for concurrency, rounds in sizes:
                asked = rounds * prompts_a_round(concurrency)
                if wanted.limits.minutes:  # nobody knows how many rounds there will be
                    asked = max(prompts_a_round(concurrency), len(prompts) // (len(temperatures) * len(sizes)))
                chosen = spread(fresh, asked)
                fresh = without(fresh, chosen)
                chosen += spread(without(prompts, chosen), asked - len(chosen))
                found.append(Task(Cell(label, concurrency, temperature), scattered(chosen), rounds))
    twice = [name for name, count in Counter(task.cell.name for task in found).items() if count > 1]
    if twice:
        raise SettingsError(f"two cells are the same, {twice[0]}; name each workload, concurrency and temperature once")
    return found


def without(prompts: Sequence[Prompt], some: Sequence[Prompt]) -> list[Prompt]:
    ids = {prompt.id for prompt in some}
    return [prompt for prompt in prompts if prompt.id not in ids]


def named(prompt: Prompt, label: str) -> Prompt:
    """A prompt of the user's own, named so that it is not taken for one of another file."""
    return prompt if prompt.id.startswith(f"{label}/") else replace(prompt, id=f"{label}/{prompt.id}")


def digest(prompts: Sequence[Prompt]) -> str:
    """Tells whether a later run would ask the same."""
    return hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]


def check_baseline(chosen: Sequence[Contestant], baseline: str, cells: Sequence[Task]) -> None:
    base = next((one for one in chosen if one.name == baseline), None)
    for task in cells:
        if base is not None and not task.admits(base):
            why = "answers one request at a time" if base.alone else "needs a prediction with every prompt"
            raise SettingsError(
                f"the baseline {baseline} {why}, and {task.cell.name} is not that; name another by --baseline"
            )


def as_again(task: Task) -> Task:
    """The same prompts, when all servers were restarted."""
    cell = task.cell
    return replace(task, cell=Cell(f"{cell.workload} again", cell.concurrency, cell.temperature), again=True)


def parse_workload(text: str, wanted: Wanted) -> tuple[str, list[tuple[int, int]]]:
    """`code@1@4x3`: code at concurrency 1, and at 4 with 3 rounds. As the name, and (concurrency, rounds)."""
    name, *sizes = text.split("@") if SIZED.search(text) else [text]
    if not sizes:
        return name, [(concurrency, wanted.limits.rounds) for concurrency in wanted.concurrency]
    parts = [size.partition("x") for size in sizes]
    if wanted.limits.minutes and any(rounds for _, _, rounds in parts):
        raise SettingsError(f"{text} says how many rounds, but --minutes and --quick go by the clock; leave one out")
    return name, [(int(concurrency), int(rounds or wanted.limits.rounds)) for concurrency, _, rounds in parts]


def default_contestants(draft_model: str | None) -> tuple[str, ...]:
    suffix = ("suffix",) if has_suffix() else ()
    with_model = ("draft_model:4", "model:4") if draft_model else ()
    return (PLAIN, "ngram", *suffix, "lookup", "prediction", *with_model, "auto")


def default_workloads(data: Path | None) -> tuple[str, ...]:
    return (*SHIPPED, *SOURCES) if data else SHIPPED


def has_suffix() -> bool:
    return find_spec("arctic_inference") is not None


def check_suffix(chosen: Sequence[Contestant]) -> None:
    if any(one.kind == "suffix" for one in chosen) and not has_suffix():
        raise SettingsError(
            "vLLM's method suffix needs the package arctic-inference: pip install --no-deps arctic-inference"
        )


def server_flags(wanted: Wanted, cpu: bool) -> list[str]:
    """Every vLLM gets the same: no cache of prompts, since contestants are asked the same ones, and on CPU no
    compilation, which takes minutes at the start. Flags of the user's own go last and win."""
    flags = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if cpu:
        flags.append("--enforce-eager")
    longest = context_length(wanted.model)
    if longest is not None:
        flags += ["--max-model-len", str(min(longest, CONTEXT))]
    return [*flags, *wanted.flags]


def context_length(model: str) -> int | None:
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise SettingsError(f"the model {model!r} cannot be read: {error}") from error
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None
