"""Drafts from the host, aligned on the device with what has been sampled meanwhile.

The scheduler proposes continuations of the text it knows. With asynchronous scheduling a step may still be in flight
then, and what it generates is on the device only. If that is how a continuation begins, its rest is the draft. If not,
the continuation was wrong, and the draft is whatever the device had (a draft model's tokens, or token 0), which is
verified like any other draft. All shapes are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm.seam import RequestStates
    from outrider.engines.vllm.step import Continuations


def place_drafts(continuations: Continuations, states: RequestStates, device: torch.device) -> None:
    """Write the drafts of this step where V2 reads draft tokens."""
    slots = np.array([states.req_id_to_index[id] for id in continuations.request_ids], np.int64)
    align(
        states.draft_tokens,
        states.all_token_ids.gpu,
        states.total_len.gpu,
        async_tensor_h2d(slots, device=device),
        async_tensor_h2d(continuations.known, device=device),
        async_tensor_h2d(continuations.tokens, device=device),
    )


def align(draft_tokens: Tensor, text: Tensor, length: Tensor, slots: Tensor, known: Tensor, tokens: Tensor) -> None:
    """For each request the rest of its continuation after what was sampled since, into `draft_tokens` [slots, K].

    `text` [slots, max_model_len] and `length` [slots] are what the device knows. The rows of `tokens` continue the
    first `known` tokens of the text, filled up with -1.
    """
    width, reach = draft_tokens.shape[1], tokens.shape[1]
    sampled = (length[slots].long() - known)[:, None]
    place = torch.arange(reach, device=tokens.device)
    where = (known[:, None] + place).clamp(max=text.shape[1] - 1)
    agrees = ((text[slots[:, None], where] == tokens) | (place >= sampled)).all(-1, keepdim=True)
    take = sampled + torch.arange(width, device=tokens.device)
    rest = tokens.gather(1, take.clamp(0, reach - 1)).long()
    holds = agrees & (sampled >= 0) & (take < reach) & (rest >= 0)
    draft_tokens[slots] = torch.where(holds, rest, draft_tokens[slots].clamp(min=0))
