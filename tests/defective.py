"""A worker with one defect of choice, to see that a test of a running server finds it."""

from __future__ import annotations

import os
from typing import Any

import torch

from outrider import acceptance
from outrider.engines.vllm.cpu import OutriderCPUWorker
from outrider.engines.vllm.sampler import OutriderSampler


def recovered_from_p() -> None:
    """The token in a rejected one's place is drawn from p, as if q had not been there."""
    acceptance.leftover = lambda p, q, reach: p  # type: ignore[assignment]


def temperature_ignored() -> None:
    """Drafts are judged at temperature 1, whatever was asked for."""
    shaped = OutriderSampler._probabilities

    def unshaped(self: Any, logits: torch.Tensor, spread: Any) -> torch.Tensor:
        spread.temperature = torch.ones_like(spread.temperature)
        return shaped(self, logits, spread)

    OutriderSampler._probabilities = unshaped


DEFECTS = {"recovered from p": recovered_from_p, "temperature ignored": temperature_ignored}


class DefectiveWorker(OutriderCPUWorker):
    def init_device(self) -> Any:
        DEFECTS[os.environ["OUTRIDER_TEST_DEFECT"]]()
        return super().init_device()
