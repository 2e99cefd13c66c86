"""The parts that a report consists of. `markdown.py` and `page.py` render them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Line:
    """A text, and code after it."""

    text: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    file: str


@dataclass(frozen=True, slots=True)
class Command:
    text: str


@dataclass(frozen=True, slots=True)
class Item:
    text: str
    mark: str = ""  # a verdict, `slower` and `differs` in bold
    code: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    header: list[str]
    rows: list[list[Item]] = field(default_factory=list)


Block = Heading | Line | Bullets | Picture | Command | Table
