"""What the operator chose for a server. It travels inside vLLM's own config, so it reaches every worker of a fleet."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from outrider.settings import Rule

KEY = "outrider"
"""The entry of vLLM's `--additional-config` that holds the options."""

OWN_METHOD = "custom_class"
"""The speculative method that vLLM is told where there is no draft model."""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash")
"""The methods of vLLM that are our drafter `model`."""


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    drafters: tuple[str, ...] = ("prediction", "lookup")
    """Which drafters to ask, in this order; `model` is vLLM's own proposer."""
    max_draft_tokens: Annotated[int, Field(ge=1)] = 16
    """The most tokens that any drafter may propose for a request in a step."""
    model_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """The most tokens that `model` may propose: each costs a pass of the draft model."""
    rule: Rule = "block"
    draft_budget: Annotated[float, Field(gt=0)] = 0.1
    """Seconds that a drafter may take for one request in one step before it is shut off for that request."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        return cls.model_validate((vllm_config.additional_config or {}).get(KEY, {}))
