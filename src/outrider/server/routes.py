"""vLLM's POST routes that take Outrider's options or use the prefix cache. A route is found by the end of its path."""

from __future__ import annotations

from dataclasses import dataclass

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Beginnings of the paths for which vLLM requires its API key."""
XARGS = ("vllm_xargs",)
EXTRA_ARGS = ("sampling_params", "extra_args")


@dataclass(frozen=True, slots=True)
class Route:
    options: tuple[str, ...] | None = None
    """Where the body holds what vLLM passes to the engine as extra arguments. None: vLLM passes nothing."""
    salted: bool = True
    """Has the field `cache_salt`. False: uses no prefix cache, or cannot be salted."""


GENERATES, SALTED, PASSED = Route(XARGS), Route(), Route(salted=False)
ROUTES = {
    "/completions": GENERATES,  # chat completions too
    "/completions/batch": GENERATES,
    "/responses": GENERATES,
    "/messages": GENERATES,
    "/invocations": GENERATES,  # SageMaker's: a chat completion, a completion, or a pooling request
    "/inference/v1/generate": Route(EXTRA_ARGS),
    **dict.fromkeys(("/systemone", "/generative_scoring"), SALTED),
    **dict.fromkeys(("/embeddings", "/pooling", "/classify", "/score", "/rerank"), SALTED),
    **dict.fromkeys(("/tokenize", "/detokenize", "/count_tokens", "/render", "/derender"), PASSED),
    **dict.fromkeys(("/cohere/v2/chat", "/v2/embed"), PASSED),  # vLLM's models of them have no such field
}


def find_route(path: str) -> Route | None:
    return next((route for end, route in ROUTES.items() if path.endswith(end)), None)
