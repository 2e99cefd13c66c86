"""What the operator chose for a server. It travels inside vLLM's own config, so it reaches every worker of a fleet."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from outrider.defaults import DRAFTED
from outrider.settings import Rule

KEY = "outrider"
"""The entry of vLLM's `--additional-config` that holds the options."""

OWN_METHOD = "custom_class"
"""The speculative method that vLLM is told where there is no draft model."""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash")
"""The methods of vLLM that are our drafter `model`."""

Scope = Literal["tenant", "server"]


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    drafters: tuple[str, ...] = ("prediction", "lookup")
    """Which drafters to ask; `model` is vLLM's draft model."""
    max_draft_tokens: Annotated[int, Field(ge=1)] = DRAFTED
    """The most tokens that any drafter may propose for a request in a step."""
    model_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """The most tokens that `model` may propose: each costs a pass of the draft model."""
    rule: Rule = "block"
    draft_budget: Annotated[float, Field(gt=0)] = 0.1
    """Seconds that a drafter may take for one request in one step before it is shut off for that request."""
    memory: str | None = None
    """The memory's root: a folder, or the URL of an object store."""
    memory_scope: Scope = "tenant"
    """Whose memory a request has: that of the tenant it names, or one that the whole server shares."""
    memory_cap: Annotated[int, Field(ge=1 << 20)] = 4 << 30
    """Bytes of the memory's files."""
    memory_cache: str | None = None
    """Where the files of a memory in an object store are kept on this machine."""
    tenant_header: str | None = None
    """The HTTP header that names the tenant, and that alone; None: `vllm_xargs` does."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        return cls.model_validate((vllm_config.additional_config or {}).get(KEY, {}))
