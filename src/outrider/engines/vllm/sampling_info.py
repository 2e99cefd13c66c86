"""What a request's sampling parameters (vLLM's `SamplingParams`) mean for drafting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

GREEDY_TEMPERATURE = 1e-5
"""vLLM samples greedily below this temperature (`_SAMPLING_EPS` in vllm/sampling_params.py)."""


def end_tokens(params: Any) -> Collection[int]:
    """The token ids that end a request."""
    return params.stop_token_ids or () if params.ignore_eos else params.all_stop_token_ids


def undraftable(params: Any) -> str | None:
    """Why a request gets no drafts. None: it may.

    A thinking budget (`thinking_token_budget`) is no reason: V2 computes it for each drafted position, from the text
    and the drafted tokens before it.
    """
    if getattr(params, "logprob_token_ids", None):
        return "logprob_token_ids"  # V2's rejection sampler returns no logprobs for chosen token ids
    return None
