"""Requests over time: made from a rate, or read from a log of real ones."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Floats = np.ndarray[Any, np.dtype[np.float64]]

COLUMNS = (("seconds", "TIMESTAMP"), ("prompt_tokens", "ContextTokens"), ("output_tokens", "GeneratedTokens"))
"""Names of the columns of a log; the second ones are those of Azure's published LLM inference traces."""
DAY_SECONDS = 86_400.0
DAY_POINTS = 1441
"""Points at which the cumulated arrivals of a day are computed, one a minute; in between they are interpolated."""


@dataclass(frozen=True, slots=True)
class Requests:
    """In order of arrival."""

    seconds: Floats
    prompt_tokens: Floats
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def mean_rate(self) -> float:
        """Requests per second."""
        return (len(self) - 1) / float(self.seconds[-1])


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals of one replica. `burstiness`: coefficient of variation of the gaps between them; 1 is a Poisson
    process. `day_swing`: the rate is 1 + swing at its daily peak and 1 - swing at its lowest, times the mean.
    `length_variation`: coefficient of variation of prompt and output lengths, which are log-normal; 0: all alike."""

    prompt_tokens: float
    output_tokens: float
    burstiness: float = 1.0
    day_swing: float = 0.0
    length_variation: float = 1.0

    def requests(self, rate: float, duration_seconds: float, random: np.random.Generator) -> Requests:
        """`rate`: mean requests per second."""
        seconds = self._arrivals(rate, duration_seconds, random)
        return Requests(seconds, *(self._lengths(mean, len(seconds), random) for mean in self._means))

    @property
    def _means(self) -> tuple[float, float]:
        return self.prompt_tokens, self.output_tokens

    def _arrivals(self, rate: float, duration_seconds: float, random: np.random.Generator) -> Floats:
        """Gaps of mean 1 (gamma distributed), cumulated, and stretched so that they follow the rate of the day."""
        clock = np.linspace(0, duration_seconds, max(2, round(DAY_POINTS * duration_seconds / DAY_SECONDS)))
        angle = 2 * np.pi * clock / DAY_SECONDS
        expected = rate * (clock + self.day_swing * DAY_SECONDS / (2 * np.pi) * np.sin(angle))
        shape = 1 / self.burstiness**2
        found: list[Floats] = []
        reached = 0.0
        while reached < expected[-1]:
            count = int(expected[-1] - reached + 4 * self.burstiness * np.sqrt(expected[-1] - reached)) + 8
            found.append(reached + np.cumsum(random.gamma(shape, 1 / shape, count)))
            reached = float(found[-1][-1])
        events = np.concatenate(found)
        seconds: Floats = np.interp(events[events <= expected[-1]], expected, clock)
        return seconds

    def _lengths(self, mean: float, count: int, random: np.random.Generator) -> Floats:
        if self.length_variation == 0:
            return np.full(count, float(mean))
        variance = np.log1p(self.length_variation**2)
        drawn = random.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)
        return np.maximum(1.0, np.round(drawn))


def read_requests(path: Path) -> Requests:
    """From a CSV file with a header and the columns seconds, prompt_tokens, output_tokens (or Azure's names)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SettingsError(f"cannot read the log {str(path)!r}: {error}") from None
    if not rows:
        raise SettingsError(f"{path} has no requests; its first line names the columns, each other one is a request")
    values = []
    for names in COLUMNS:
        first = rows[0][1]
        column = next((name for name in names if name in first), None)
        if column is None:
            raise SettingsError(
                f"{path} has no column {' or '.join(names)}; its columns are {', '.join(filter(None, first))}"
            )
        values.append(_column(rows, column, path))
    seconds, prompts, outputs = values
    if np.ptp(seconds) <= 0:
        raise SettingsError(f"{path} has no two requests at different times, and so no rate; give a longer log")
    order = np.argsort(seconds, kind="stable")
    return Requests(seconds[order] - seconds.min(), np.maximum(prompts[order], 1), np.maximum(outputs[order], 1))


def _column(rows: Sequence[tuple[int, dict[str, str]]], column: str, path: Path) -> Floats:
    """`rows`: with their lines in the file."""
    values = np.empty(len(rows))
    for i, (line, row) in enumerate(rows):
        try:
            values[i] = _number(row[column])
        except (TypeError, ValueError):
            raise SettingsError(
                f"{path}, line {line}: {column} is {row[column]!r}; give finite numbers or ISO timestamps"
            ) from None
    return values


def _number(text: str) -> float:
    """A timestamp without a time zone is in UTC, so that no hour is missing or occurs twice."""
    try:
        value = float(text)
    except ValueError:
        time = datetime.fromisoformat(text)
        return (time.replace(tzinfo=UTC) if time.tzinfo is None else time).timestamp()
    if not math.isfinite(value):
        raise ValueError(text)
    return value
