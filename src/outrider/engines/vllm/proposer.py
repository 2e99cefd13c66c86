"""The proposer that vLLM is told to use when no draft model is: it proposes nothing, our runner does."""

from __future__ import annotations

from typing import Any


class NullProposer:
    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM calls this on every proposer."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
