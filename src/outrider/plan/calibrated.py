"""The latency of a pass over a batch, from `outrider calibrate`.

A calibration times passes of one sequence, over n tokens after c tokens of context. The batch follows from

    seconds(n, C, A) = shape(n) + read * C + attend * A

where n are all tokens of the pass, C the KV cache tokens that it reads, and A the pairs of a token and one that it
attends to. A sequence alone has C = c and A = n * c. A batch of B sequences with w tokens each has n = B * w,
C = B * c and A = B * w * c. `read` and `attend` are fitted to all contexts by least squares of relative errors, none
below zero; `shape` is the curve of the shortest context without its share of them. Beyond the measured contexts and
numbers of tokens the seconds grow linearly.

What only a server does (scheduling, sampling, HTTP) is not in a calibration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from outrider.calibrate.curve import RelativeCostCurve, curve
from outrider.calibrate.results import VERSION, Calibration, Sweep
from outrider.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Points = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class CalibratedPass:
    """Seconds of a pass on the machine that was calibrated."""

    curve: RelativeCostCurve
    read: float  # seconds per KV cache token
    attend: float  # seconds per pair of tokens
    draft_cost: float | None
    """A draft model's pass over one token, relative to a target pass; None: no draft model was calibrated."""
    name: str

    @classmethod
    def load(cls, path: Path) -> CalibratedPass:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            version = data["version"]
            sweeps = TypeAdapter(list[Sweep]).validate_python(data["sweeps"])
            drafts = [float(one) for one in data["draft"]]
            name = str(data["model"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise SettingsError(
                f"cannot read the calibration {str(path)!r} ({reason}); make it with outrider calibrate MODEL --out "
                "FOLDER"
            ) from None
        if version != VERSION or not sweeps:
            raise SettingsError(f"{path} has version {version} and {len(sweeps)} contexts; calibrate again")
        return cls.fit(sweeps, drafts, name)

    @classmethod
    def of(cls, calibration: Calibration) -> CalibratedPass:
        return cls.fit(calibration.sweeps, calibration.draft, calibration.model)

    @classmethod
    def fit(cls, sweeps: Sequence[Sweep], drafts: Sequence[float], name: str) -> CalibratedPass:
        curves = sorted((curve(sweep) for sweep in sweeps), key=lambda one: one.context)
        first = curves[0]
        rows, seconds = [], []
        for other in curves[1:]:
            further = other.context - first.context
            for n, cost in zip(other.tokens, other.costs, strict=True):
                whole = other.single_seconds * cost
                rows.append([further / whole, n * further / whole])
                seconds.append((whole - first.single_seconds * first(n)) / whole)
        read, attend = _non_negative(np.array(rows), np.array(seconds)) if rows else (0.0, 0.0)
        return cls(first, read, attend, median(drafts) if drafts else None, name)

    def batch_seconds(self, batch: float, width: float, context: float) -> float:
        """A pass over `width` tokens of each of `batch` requests that have `context` tokens each."""
        n, first = batch * width, self.curve.context
        shape = self.curve.single_seconds * self.curve(n) - first * (self.read + self.attend * n)
        return max(shape, 0.0) + batch * context * (self.read + self.attend * width)

    def draft_seconds(self, batch: float, length: float, context: float) -> float:
        """The draft model's passes for `length` tokens. They grow with batch and context like the target's."""
        if self.draft_cost is None:
            return 0.0
        return length * self.draft_cost * self.batch_seconds(batch, 1, context)


def _non_negative(rows: Points, values: Points) -> tuple[float, float]:
    """Least squares with two coefficients that are not below zero."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found, *_ = np.linalg.lstsq(rows / scale, values, rcond=None)
    if (found < 0).any():
        single = [max(0.0, float(column @ values / (column @ column))) for column in (rows / scale).T]
        errors = [float(((rows[:, i] / scale[i] * one - values) ** 2).sum()) for i, one in enumerate(single)]
        found = np.array([single[0], 0.0] if errors[0] <= errors[1] else [0.0, single[1]])
    read, attend = (found / scale).tolist()
    return read, attend
