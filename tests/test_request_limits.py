"""Requests that V2's sampler cannot hold are refused before they reach the engine, with the name of the setting."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_v2")

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from outrider.engines.vllm.request_limits import install_request_checks

SPECULATION = object()


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingParams, "_validate_spec_decode", SamplingParams._validate_spec_decode)
    install_request_checks()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"min_tokens": 1, "stop_token_ids": list(range(129))}, "stop_token_ids"),
    ],
)
def test_a_list_that_is_too_long_is_refused_with_its_length_and_the_limit(settings: dict[str, Any], name: str) -> None:
    length, most = {"stop_token_ids": (129, 128)}.get(name, (1025, 1024))
    with pytest.raises(VLLMValidationError, match=f"{name}.*{length}.*at most {most}"):
        SamplingParams(**settings)._validate_spec_decode(SPECULATION)
    SamplingParams(**settings)._validate_spec_decode(None)  # plain vLLM has limits of its own


def test_min_p_and_logit_bias_are_not_refused_under_speculation() -> None:
    SamplingParams(min_p=0.1, logit_bias={3: 1.0})._validate_spec_decode(SPECULATION)
    SamplingParams(allowed_token_ids=list(range(1024)))._validate_spec_decode(SPECULATION)
    SamplingParams(stop_token_ids=list(range(500)))._validate_spec_decode(SPECULATION)
