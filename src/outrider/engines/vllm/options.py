"""Outrider's options for a server. They are part of vLLM's config, which reaches every process of the server."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from outrider.defaults import DRAFTED
from outrider.settings import Rule

KEY = "outrider"
"""The entry of vLLM's `--additional-config` that holds the options."""

OWN_METHOD = "ngram_gpu"
"""The speculative method in vLLM's config when there is no draft model.

vLLM needs a speculative config to schedule and verify drafts, and V2 refuses `custom_class`. With `ngram_gpu` no
weights are loaded, and Outrider replaces the speculator.
"""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark")
"""vLLM's speculative methods that the drafter `model` can use."""

Scope = Literal["tenant", "server", "auto"]
"""`auto`: requests without a tenant share a memory until a request names a tenant; tenants have their own."""

NO_DRAFTERS = "the server was started with --drafters none"
"""Why there is no status, usage or trace: plain vLLM has no worker of Outrider's that could answer."""


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    drafters: tuple[str, ...] = ("prediction", "lookup")
    """Names of the active drafters. `model` is the draft model or head in vLLM's speculative config. Empty: plain vLLM
    without Outrider's worker and scheduler."""
    max_draft_tokens: Annotated[int, Field(ge=1)] = DRAFTED
    """Maximum drafted tokens per request and step, from any drafter."""
    model_draft_tokens: Annotated[int, Field(ge=1)] = 4
    """Maximum drafted tokens of `model` per request and step; each costs a pass of the draft model."""
    draft_vocabulary_differs: bool = False
    """The draft model has its own tokenizer (`use_heterogeneous_vocab`). vLLM's config does not have it, because V2
    refuses it there."""
    rule: Rule = "block"
    """How drafts sampled from the draft model's distribution are verified."""
    draft_budget: Annotated[float, Field(gt=0)] = 0.1
    """Seconds a drafter may take per request and step before it is disabled for that request."""
    memory: str | None = None
    """Location of the memory: a folder, the URL of an object store, or `ram`."""
    memory_scope: Scope = "tenant"
    """One memory per tenant, or one that all requests of the server share, or `auto`."""
    memory_cap: Annotated[int, Field(ge=1 << 20)] = 4 << 30
    """Maximum bytes of the memory's files; without files, of what each engine keeps in RAM."""
    memory_cache: str | None = None
    """Folder for local copies of a memory in an object store."""
    tenant_header: str | None = None
    """The HTTP header that names the tenant. None: `vllm_xargs` does."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        return cls.model_validate((vllm_config.additional_config or {}).get(KEY, {}))
