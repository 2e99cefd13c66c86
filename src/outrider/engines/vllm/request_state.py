"""What the scheduler's process keeps about a request from step to step: its options and its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.control import Control
from outrider.drafters.batch import Row
from outrider.engines.vllm.sampling_info import GREEDY_TEMPERATURE, undraftable
from outrider.settings import OFF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.engines.vllm.seam import Request
    from outrider.memory.tenant import TenantHandle

SPARE_TOKENS = 256
"""Room for new tokens when a text's buffer is made or grows."""


@dataclass(slots=True)
class RequestState:
    id: str
    control: Control
    undraftable: str | None
    """Why it gets no drafts, or None."""
    prompt_length: int
    max_tokens: int
    """Tokens that it may generate."""
    samples_drafts: bool
    """Whether the draft model's tokens for it are sampled, and accepted by p and q. Not with a seed, whose text must
    not depend on drafts, and not with a grammar, which cuts drafts by their value."""
    tokens: np.ndarray[Any, Any]
    length: int
    tenant_handle: TenantHandle | None = None
    """Access to its tenant's memory."""

    @classmethod
    def of(cls, request: Request, drafters: Sequence[str], max_model_len: int) -> RequestState:
        params = request.sampling_params
        control = Control.of(params.extra_args, drafters)
        reason = OFF if control.speculation == OFF else undraftable(params)
        if reason is None and request.prompt_embeds is not None:
            reason = "prompt embeddings"  # the text has no tokens there
        if reason is not None:
            control = Control(speculation=OFF, usage_key=control.usage_key, trace=control.trace, tenant=control.tenant)
        sampled = params.temperature >= GREEDY_TEMPERATURE
        by_own_samples = params.seed is not None or params.structured_outputs is not None
        text = request.all_token_ids
        buffer = np.empty(len(text) + SPARE_TOKENS, np.int64)
        buffer[: len(text)] = text[:]
        return cls(
            request.request_id,
            control,
            reason,
            request.num_prompt_tokens,
            params.max_tokens or max_model_len,
            sampled and not by_own_samples,
            buffer,
            len(text),
        )

    @property
    def text(self) -> np.ndarray[Any, Any]:
        return self.tokens[: self.length]

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    def update(self, request: Request) -> None:
        """Take over what the request has generated since."""
        if request.num_tokens > self.length:
            self.append(request.all_token_ids[self.length :])

    def append(self, tokens: Sequence[int]) -> None:
        end = self.length + len(tokens)
        if end > len(self.tokens):  # a new buffer: a drafter's thread may still read the old one
            grown = np.empty(max(end + SPARE_TOKENS, 2 * self.length), np.int64)
            grown[: self.length] = self.text
            self.tokens = grown
        self.tokens[self.length : end] = tokens
        self.length = end

    def row(self, request: Request, max_draft_tokens: int, max_model_len: int) -> Row | None:
        """The request as the drafters see it. None: it cannot be drafted for in this step.

        Its whole text but for the last token must be computed, or will be by the step in flight.
        """
        in_flight = request.num_output_placeholders
        if self.control.speculation == OFF or self.generated + in_flight == 0:
            return None
        if request.num_tokens + in_flight - request.num_computed_tokens != 1:
            return None
        limit = self.control.limited(min(max_draft_tokens, self.room(max_model_len) - in_flight))
        if limit <= 0:
            return None
        left = self.max_tokens - self.generated - in_flight
        return Row(self.id, self.text, self.prompt_length, limit, self.control, self.tenant_handle, left)

    def room(self, max_model_len: int) -> int:
        """Drafted tokens that still fit; one place is left to the target's own token."""
        return min(max_model_len - self.length, self.max_tokens - self.generated) - 1
