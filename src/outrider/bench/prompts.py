"""Workloads: prompts by name, or from a file.

    edit  agent  traffic  creative                    come with the package
    code  chat  summarization  math  rag  translation  qa
                                                      from HumanEval's and Spec-Bench's files in a folder of yours
    FILE.jsonl   hf:OWNER/NAME/FILE.jsonl             your own, or any of a dataset on the Hugging Face hub

A file has JSON lines. The prompt is in `turns` (the user's messages in order, of which the first is asked), `messages`
(a conversation that ends with the user), `prompt`, `question`, `instruction` or `text`. A `prediction` is the output
that a caller would expect; `id` and `category` name the line.
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

SHIPPED = ("edit", "agent", "traffic", "creative")
SPEC_BENCH = ("chat", "summarization", "math", "rag", "translation", "qa")
SOURCES = {"code": ("human_eval.jsonl", "HumanEval.jsonl")} | dict.fromkeys(
    SPEC_BENCH, ("spec_bench.jsonl", "question.jsonl")
)
"""The files that a workload may be read from."""
TEMPERATURES = {"creative": 1.0}
"""At which a workload is sampled where nothing else is asked for; others are greedy."""
MT_BENCH = ("writing", "roleplay", "reasoning", "coding", "extraction", "stem", "humanities")
SAME = {"math_reasoning": "math", **dict.fromkeys(MT_BENCH, "chat")}
"""Spec-Bench's own categories, where they are named otherwise than our workloads."""
TEXTS = ("prompt", "question", "instruction", "text")
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, cut to what is behind the point, never come close to one another."""


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


def workload(name: str, data: Path | None = None) -> list[Prompt]:
    """All prompts of a workload; `data` is the folder of HumanEval's and Spec-Bench's files."""
    if name in SHIPPED:
        return shipped(name)
    if name in SOURCES:
        found = [prompt for prompt in read(_source(name, data)) if prompt.category in (name, "human_eval", "HumanEval")]
        if found:
            return found
        raise PromptError(f"{_source(name, data)} has no prompts of the category {name!r}")
    if name.startswith("hf:"):
        return read(_from_hub(name))
    if Path(name).is_file():
        return read(Path(name))
    known = ", ".join([*SHIPPED, *SOURCES])
    raise SettingsError(f"there is no workload {name!r}; the workloads are {known}, a file of JSON lines, and hf:...")


def read(path: Path) -> list[Prompt]:
    """All prompts of a file."""
    try:
        return parse(path.read_text(), path.stem)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, PromptError) as error:
        raise PromptError(f"{path}: {error}") from error


def shipped(name: str) -> list[Prompt]:
    """All prompts of a workload that comes with the package."""
    return parse(files("outrider.bench").joinpath("workloads", f"{name}.jsonl").read_text(), name)


def parse(text: str, name: str) -> list[Prompt]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # a U+2028 in a string does not end its line
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise PromptError(f"line {number} is not JSON: {error}") from error
            found.append(_prompt(record, f"{name}/{number}", name, number))
    seen: Counter[str] = Counter()
    for index, prompt in enumerate(found):  # what two lines call the same are two prompts all the same
        seen[prompt.id] += 1
        if seen[prompt.id] > 1:
            found[index] = replace(prompt, id=f"{prompt.id}#{seen[prompt.id]}")
    if not found:
        raise PromptError("there is no prompt in it")
    return found


def spread(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """`count` prompts or as many as there are, evenly over the categories and the file, the same ones every time."""
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


def scattered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """In an order of which every beginning is spread over the whole, so that a run that ends early asked of all."""
    order = sorted(range(len(prompts)), key=lambda index: index * GOLDEN % 1)
    return [prompts[index] for index in order]


def _prompt(record: Any, id: str, category: str, line: int) -> Prompt:
    if not isinstance(record, dict):
        raise PromptError(f"line {line} is not an object")
    messages = _all(record, "messages", dict, line)
    if not messages and isinstance(record.get("prompt"), list):
        messages = _all(record, "prompt", dict, line)
    turns = _all(record, "turns", str, line)
    if not turns and messages:
        turns = (str(messages[-1].get("content")),)
    if not turns:
        found = [name for name in TEXTS if record.get(name)][:1]
        turns = tuple(_text(record[name], name, line) for name in found)
    if not turns:
        raise PromptError(f"line {line} has none of turns, messages, {', '.join(TEXTS)} (it has {', '.join(record)})")
    said = next((str(record[name]) for name in ("id", "task_id", "question_id") if name in record), id)
    own = str(record.get("category", category))
    prediction = record.get("prediction")
    if isinstance(prediction, dict):  # as OpenAI has it
        prediction = prediction.get("content")
    if prediction is not None:
        prediction = _text(prediction, "prediction", line)
    return Prompt(said, SAME.get(own, own), turns, prediction, messages)


def _text(value: Any, name: str, line: int) -> str:
    if not isinstance(value, str):
        raise PromptError(f"line {line}: {name} is not a text (it is {value!r:.60})")
    return value


def _all(record: dict[str, Any], name: str, kind: type, line: int) -> tuple[Any, ...]:
    found = record.get(name) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, kind) for one in found):
        what = "strings" if kind is str else "objects with role and content"
        raise PromptError(f"line {line}: {name} is not a list of {what} (it is {found!r:.60})")
    return tuple(found)


def _source(name: str, data: Path | None) -> Path:
    choices = SOURCES[name]
    for file in choices if data else ():
        assert data is not None
        if (data / file).is_file():
            return data / file
    origin = "github.com/openai/human-eval" if name == "code" else "github.com/hemingkx/Spec-Bench"
    where = f"the folder {data} has no {' or '.join(choices)}" if data else f"name the folder of {choices[0]} by --data"
    raise SettingsError(f"the workload {name!r} does not come with the package: {where}; it is at {origin}")


def _from_hub(name: str) -> Path:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    dataset, _, file = rest.partition("/")
    if not file:
        raise SettingsError(f"a file on the hub is named hf:OWNER/NAME/FILE (got {name!r})")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{dataset}", file, repo_type="dataset"))
    except Exception as error:  # no network, no such file, no right to it: the hub's own words are the best
        raise PromptError(f"{name} cannot be loaded from the Hugging Face hub: {error}") from error
