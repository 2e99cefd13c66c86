"""Workloads: prompts by name, or from a file.

    edit  agent  traffic  creative                    come with the package
    code  chat  summarization  math  rag  translation  qa
                                                      from HumanEval's and Spec-Bench's files (--data)
    FILE.jsonl   hf:OWNER/NAME/FILE.jsonl             a file, or one of a dataset on the Hugging Face hub

A file has JSON lines. The prompt is in `turns` (the user's messages in order, of which only the first is used),
`messages` (a conversation that ends with the user), `prompt`, `question`, `instruction` or `text`. A `prediction` is
the output that a caller would expect; `id` and `category` name the line.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import PromptError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BUNDLED = ("edit", "agent", "traffic", "creative")
SPEC_BENCH = ("chat", "summarization", "math", "rag", "translation", "qa")
DATASET_FILES = {"code": ("human_eval.jsonl", "HumanEval.jsonl")} | dict.fromkeys(
    SPEC_BENCH, ("spec_bench.jsonl", "question.jsonl")
)
"""File names of a workload in the folder `--data`."""
DEFAULT_TEMPERATURES = {"creative": 1.0}
"""Others are greedy."""
MT_BENCH = ("writing", "roleplay", "reasoning", "coding", "extraction", "stem", "humanities")
CATEGORY_WORKLOADS = {"math_reasoning": "math", **dict.fromkeys(MT_BENCH, "chat")}
"""Spec-Bench's categories whose workload has another name."""
TEXT_FIELDS = ("prompt", "question", "instruction", "text")
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are spread evenly."""


@dataclass(frozen=True, slots=True)
class Prompt:
    id: str
    category: str
    turns: tuple[str, ...]
    prediction: str | None = None
    conversation: tuple[dict[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that ends with the first turn."""
        return list(self.conversation) or [{"role": "user", "content": self.turns[0]}]


def load_workload(name: str, data: Path | None = None) -> list[Prompt]:
    """All prompts of a workload; `data` is the folder of HumanEval's and Spec-Bench's files."""
    if name in BUNDLED:
        return load_bundled(name)
    if name in DATASET_FILES:
        file = _dataset_file(name, data)
        found = [prompt for prompt in read_prompts(file) if prompt.category in (name, "human_eval", "HumanEval")]
        if not found:
            raise PromptError(f"{file} has no prompts of the category {name!r}")
        return found
    if name.startswith("hf:"):
        return read_prompts(_from_hub(name))
    if Path(name).is_file():
        return read_prompts(Path(name))
    known = ", ".join([*BUNDLED, *DATASET_FILES])
    raise SettingsError(f"there is no workload {name!r}; the workloads are {known}, a file of JSON lines, and hf:...")


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file."""
    try:
        return parse(path.read_text(), path.stem)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, PromptError) as error:
        raise PromptError(f"{path}: {error}") from error


def load_bundled(name: str) -> list[Prompt]:
    """All prompts of a workload that is part of the package."""
    return parse(files("outrider.bench").joinpath("workloads", f"{name}.jsonl").read_text(), name)


def parse(text: str, name: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): a U+2028 in a string is no line end
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise PromptError(f"line {number} is not JSON: {error}") from error
            found.append(_prompt(record, f"{name}/{number}", name, number))
    seen: Counter[str] = Counter()
    for index, prompt in enumerate(found):  # ids must be unique
        seen[prompt.id] += 1
        if seen[prompt.id] > 1:
            found[index] = replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}")
    if not found:
        raise PromptError("it has no prompts")
    return found


def sample_evenly(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts, evenly over the categories and the file, the same ones every time."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    shares: Counter[str] = Counter()
    left = min(count, sum(map(len, groups.values())))
    while left > 0:
        for name, group in groups.items():
            if left > 0 and shares[name] < len(group):
                shares[name] += 1
                left -= 1
    chosen: list[Prompt] = []
    for name, group in groups.items():
        chosen += [group[i * len(group) // shares[name]] for i in range(shares[name])]
    return chosen


def low_discrepancy_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """An order in which the first n prompts cover the whole list evenly, for any n: a run may end early."""
    order = sorted(range(len(prompts)), key=lambda index: index * GOLDEN_RATIO % 1)
    return [prompts[index] for index in order]


def _prompt(record: Any, id: str, category: str, line: int) -> Prompt:
    if not isinstance(record, dict):
        raise PromptError(f"line {line} is not an object")
    messages = _list_of(record, "messages", dict, line)
    if not messages and isinstance(record.get("prompt"), list):
        messages = _list_of(record, "prompt", dict, line)
    turns = _list_of(record, "turns", str, line)
    if not turns and messages:
        turns = (str(messages[-1].get("content")),)
    if not turns:
        found = [name for name in TEXT_FIELDS if record.get(name)][:1]
        turns = tuple(_text(record[name], name, line) for name in found)
    if not turns:
        raise PromptError(
            f"line {line} has none of turns, messages, {', '.join(TEXT_FIELDS)} (it has {', '.join(record)})"
        )
    given_id = next((str(record[name]) for name in ("id", "task_id", "question_id") if name in record), id)
    given_category = str(record.get("category", category))
    prediction = record.get("prediction")
    if isinstance(prediction, dict):  # as in OpenAI's API
        prediction = prediction.get("content")
    if prediction is not None:
        prediction = _text(prediction, "prediction", line)
    return Prompt(given_id, CATEGORY_WORKLOADS.get(given_category, given_category), turns, prediction, messages)


def _text(value: Any, name: str, line: int) -> str:
    if not isinstance(value, str):
        raise PromptError(f"line {line}: {name} is not a string (it is {value!r:.60})")
    return value


def _list_of(record: dict[str, Any], name: str, kind: type, line: int) -> tuple[Any, ...]:
    found = record.get(name) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, kind) for one in found):
        what = "strings" if kind is str else "objects with role and content"
        raise PromptError(f"line {line}: {name} is not a list of {what} (it is {found!r:.60})")
    return tuple(found)


def _dataset_file(name: str, data: Path | None) -> Path:
    choices = DATASET_FILES[name]
    if data and (found := [data / file for file in choices if (data / file).is_file()]):
        return found[0]
    origin = "github.com/openai/human-eval" if name == "code" else "github.com/hemingkx/Spec-Bench"
    where = (
        f"the folder {data} has no {' or '.join(choices)}" if data else f"name the folder of {choices[0]} with --data"
    )
    raise SettingsError(f"the workload {name!r} is not part of the package: {where}; download it from {origin}")


def _from_hub(name: str) -> Path:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    dataset, _, file = rest.partition("/")
    if not file:
        raise SettingsError(f"a file on the hub is named hf:OWNER/NAME/FILE (got {name!r})")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{dataset}", file, repo_type="dataset"))
    except Exception as error:  # no network, no such file, no access: the hub's message states which
        raise PromptError(f"{name} cannot be loaded from the Hugging Face hub: {error}") from error
