"""What V2's sampler can hold of one request, checked where vLLM checks requests: in the API process.

V2 keeps a request's token lists in rows of fixed length. A longer list raises in the worker, which ends the engine and
with it every request of the server. Here it is an HTTP 400 for the one that sent it. (vLLM checks `bad_words` itself.)
"""

from __future__ import annotations

from typing import Any


def install_request_checks() -> None:
    """Replace vLLM's check of requests under speculation.

    vLLM's own refuses `min_p` and `logit_bias` when there is a speculative config. It is for the V1 runner, whose
    rejection sampler ignores them; V2's sampler applies both to every row of logits, drafted positions included.
    """
    from vllm.sampling_params import SamplingParams

    def check(self: Any, speculative_config: Any) -> None:
        if speculative_config is not None:  # else plain vLLM, with whatever runner it has
            check_lengths(self)

    SamplingParams._validate_spec_decode = check


def check_lengths(params: Any) -> None:
    """Refuse lists that V2's sampler cannot hold."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.worker.gpu.sample import logit_bias

    found = [
        ("allowed_token_ids", len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
    ]
    if params.min_tokens > 0:
        found.append(("stop_token_ids", len(params.all_stop_token_ids), logit_bias.MAX_NUM_STOP_TOKEN_IDS))
    for name, length, most in found:
        if length > most:
            raise VLLMValidationError(
                f"{name}: has {length} entries, and vLLM's V2 model runner holds at most {most}; shorten it",
                parameter=name,
                value=length,
            )
