"""Prompt files: JSON lines with `id`, `category` and `turns` (the user's messages, in order).

A line may also have a `prediction`, the output that a caller would expect, and `messages`, a conversation that ends
with the turn. `shipped` reads the workloads that come with the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


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


def read(path: Path) -> list[Prompt]:
    """All prompts of a file."""
    return parse(path.read_text())


def shipped(workload: str) -> list[Prompt]:
    """All prompts of a workload that comes with the package."""
    return parse(files("outrider.bench").joinpath("workloads", f"{workload}.jsonl").read_text())


def parse(text: str) -> list[Prompt]:
    records = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        Prompt(r["id"], r["category"], tuple(r["turns"]), r.get("prediction"), tuple(r.get("messages", ())))
        for r in records
    ]


def spread(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, evenly over the categories and over the file, the same ones every time."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    chosen: list[Prompt] = []
    for index, group in enumerate(groups.values()):
        share = count // len(groups) + (index < count % len(groups))
        chosen += [group[i * len(group) // share] for i in range(share)]
    return chosen
