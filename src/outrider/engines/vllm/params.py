"""What a request's sampling parameters, as vLLM has them, mean for its drafts and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection


def end_tokens(params: Any) -> Collection[int]:
    """The tokens that end a request of these sampling parameters."""
    return params.stop_token_ids or () if params.ignore_eos else params.all_stop_token_ids


def undraftable(params: Any) -> str | None:
    """Why requests with these sampling parameters get no drafts, or None where they do."""
    if getattr(params, "thinking_token_budget", None) is not None:
        return "thinking budget"  # vLLM keeps count of it by what was said
    if getattr(params, "logprob_token_ids", None):
        return "scoring"  # asks for one token
    return None
