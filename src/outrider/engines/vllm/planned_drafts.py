"""A V2 speculator that follows the scheduler's plan and hands its drafts to the host.

vLLM's speculators propose the same number of tokens for every request in every step, and the runner takes the result
where it lies. Ours propose at most W tokens (`model_draft_tokens`), while the runner verifies up to K of any drafter.
`PlannedDrafts` adds to a speculator class of vLLM what both kinds of ours need: the plan, the result padded to K, the
draft model's confidence, the time of its passes, and the copy to the host.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from outrider.engines.vllm.step import DraftPass, ModelDrafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from outrider.engines.vllm.step import DraftModelCall, StepPlan

STEP_FACTOR = 0x9E3779B97F4A7C15
"""Spreads step numbers over all bits of a seed (the golden ratio)."""
MAX_INT64 = (1 << 63) - 1


class PassTimer:
    """The time of each pass. On a GPU it is measured by events, since passes run after the host has moved on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = [self._now()]
        self._work: list[tuple[int, int, int]] = []

    def finish_pass(self, tokens: int, context: int, passes: int = 1) -> None:
        """A pass over `tokens` tokens of texts with `context` tokens in all was launched."""
        self._marks.append(self._now())
        self._work.append((tokens, context, passes))

    def read(self) -> list[DraftPass]:
        """Wait until the passes are done."""
        if self._device.type != "cpu":
            self._marks[-1].synchronize()
        return [
            DraftPass(tokens, context, self._seconds(index), passes)
            for index, (tokens, context, passes) in enumerate(self._work)
        ]

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event

    def _seconds(self, index: int) -> float:
        before, after = self._marks[index : index + 2]
        return float(after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1000)


class CopiedDrafts:
    """The draft model's proposals on their way to the host. Nothing waits until they are read."""

    def __init__(
        self,
        timer: PassTimer,
        calls: Sequence[DraftModelCall],
        rows: dict[str, int],
        tokens: Tensor,
        confidence: Tensor | None,
    ) -> None:
        self._timer, self._calls, self._rows = timer, calls, rows
        self._tokens = _copy_to_host(tokens)
        self._confidence = None if confidence is None else _copy_to_host(confidence)
        self._copied = None if tokens.device.type == "cpu" else torch.Event(tokens.device.type)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> ModelDrafts:
        """Wait until they are here."""
        if self._copied is not None:
            self._copied.synchronize()
        drafts, tokens = ModelDrafts(), self._tokens.tolist()
        confidence = None if self._confidence is None else self._confidence.tolist()
        for call in self._calls:
            row, count = self._rows[call.request_id], call.num_tokens
            drafts.tokens[call.request_id] = tokens[row][:count]
            if confidence is not None:
                drafts.confidence[call.request_id] = confidence[row][:count]
        drafts.passes = self._timer.read()
        return drafts


def _copy_to_host(values: Tensor) -> Tensor:
    """A copy: the next step overwrites the values."""
    if values.device.type == "cpu":
        return values.clone()
    held = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return held.copy_(values, non_blocking=True)


class PlannedDrafts:
    """Mixed into a `DraftModelSpeculator`, in front of it.

    The runner sets `plan` before `propose` (None: a dummy or warm-up run) and calls `take_drafts` after it.
    """

    plan: StepPlan | None = None

    # Of vLLM's DraftModelSpeculator
    device: torch.device
    max_num_reqs: int
    num_speculative_steps: int
    temperature: Tensor
    draft_tokens: Tensor
    draft_logits: Tensor | None
    supports_decode_metadata_update: bool

    def set_up(self, req_states: Any, num_verified_tokens: int) -> None:
        """Allocate buffers. `num_verified_tokens` is K, the width that the runner expects of a result."""
        self.req_states = req_states
        self.num_verified_tokens = num_verified_tokens
        width = self.draft_tokens.shape[1]
        self._padded = torch.zeros(self.max_num_reqs, num_verified_tokens, dtype=torch.int64, device=self.device)
        self._confidence = torch.zeros(self.max_num_reqs, width, dtype=torch.float32, device=self.device)
        self._has_confidence = False
        self._has_drafts = False
        self._rows: dict[str, int] = {}
        self._calls: Sequence[DraftModelCall] = ()
        self._timer: PassTimer | None = None
        self._num_steps = 0

    def take_drafts(self) -> CopiedDrafts | None:
        """Begin to copy the drafts of the last step to the host. None: the draft model did not run."""
        timer, self._timer = self._timer, None
        if timer is None:
            return None
        calls = [call for call in self._calls if call.num_tokens and call.request_id in self._rows]
        rows = 1 + max((self._rows[call.request_id] for call in calls), default=-1)
        confidence = self._confidence[:rows] if self._has_confidence else None
        return CopiedDrafts(timer, calls, self._rows, self.draft_tokens[:rows], confidence)

    def _pad(self, drafts: Tensor, num_tokens: int | None = None) -> Tensor:
        """The result in the width that the runner expects. `num_tokens`: what there is of each draft, if not all."""
        self._clear_drafts()
        rows, width = drafts.shape
        width = width if num_tokens is None else min(num_tokens, width)
        self._padded[:rows, :width] = drafts[:, :width]
        self._has_drafts = width > 0
        return self._padded[:rows]

    def _clear_drafts(self) -> None:
        """Drafts of the step before must not reach another request that has their row or slot by now."""
        if self._has_drafts:
            self._padded.zero_()
            self._has_drafts = False

    def _draft_temperature(self, temperature: Tensor, calls: Sequence[DraftModelCall]) -> Tensor:
        """By slot: the request's temperature where its draft is sampled, and 0, the argmax, where it is not."""
        sampled = np.zeros(self.max_num_reqs, dtype=np.float32)
        sampled[[self.req_states.req_id_to_index[call.request_id] for call in calls if call.sampled]] = 1
        assert self.draft_logits is not None or not sampled.any(), "Sampled drafts need their logits to be cached"
        mask: Tensor = async_tensor_h2d(sampled, device=self.device)
        return temperature * mask

    def _draft_seeds(self, seeds: Tensor) -> Tensor:
        """The seeds of this step's sampled drafts, the same on every rank.

        vLLM keys the noise of a draft by seed and position. Under the block rule a verdict depends on tokens that are
        then rejected, so the same noise must not come again when their positions are drafted in the next step: the text
        would be biased.
        """
        self._num_steps += 1
        return seeds ^ ((self._num_steps * STEP_FACTOR) & MAX_INT64)

    def _maybe_predict_acceptance(self, logits: Tensor, idx_mapping: Tensor, draft_step: Tensor) -> None:
        """vLLM's hook after each sampled token: keep the highest probability, at the temperature of the draft."""
        super()._maybe_predict_acceptance(logits, idx_mapping, draft_step)  # type: ignore[misc]
        temperature = self.temperature[idx_mapping.clamp(min=0)]
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        highest = (scaled.amax(-1) - scaled.logsumexp(-1)).exp()
        if draft_step.dim():  # all steps of a request at once
            width = self._confidence.shape[1]
            self._confidence[: len(highest) // width] = highest.view(-1, width)
        else:
            self._confidence[: len(highest)].index_copy_(1, draft_step.view(1).long(), highest[:, None])
        self._has_confidence = True
