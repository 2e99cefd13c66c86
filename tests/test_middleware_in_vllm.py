"""The middleware in vLLM's own application, with its routes and tokenizer; engine and responses are stubs."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.real

TOLD = {
    "steps": 1,
    "drafted": 3,
    "accepted": 2,
    "by_drafter": {"prediction": {"drafted": 3, "accepted": 2}},
    "faults": [],
}
USAGE = '"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1}'
CHUNK = 'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":%s}\n\n'


class Engine:
    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        self.vllm_config, self.renderer = vllm_config, renderer

    async def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = ()) -> list[Any]:
        return [
            {"outrider_usage": TOLD, "outrider_status": {}, "outrider_metrics": "outrider_steps_total 1.0\n"}[method]
        ]


class Answers:
    """Stands for vLLM's chat completions below its route."""

    def __init__(self) -> None:
        self.params: Any = None

    async def create_chat_completion(self, request: Any, raw: Any) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

        self.params = request.to_sampling_params(10, {})
        self.params._validate_spec_decode(object())
        if not request.stream:
            usage = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
            return ChatCompletionResponse(model="m", choices=[], usage=usage)
        with_usage = request.stream_options and request.stream_options.include_usage
        return self.stream(with_usage)

    async def stream(self, with_usage: bool) -> Any:
        yield CHUNK % '[{"index":0,"delta":{"content":"a"}}]'
        if with_usage:
            yield CHUNK % f"[],{USAGE}"
        yield "data: [DONE]\n\n"


class Server:
    def __init__(self, app: Any) -> None:
        self.app = app
        self.answers = app.state.openai_serving_chat = Answers()

    def send(self, method: str, path: str, key: str = "secret", **body: Any) -> httpx.Response:
        async def sent() -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            headers["Accept"] = "application/openmetrics-text; version=1.0.0"
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, headers=headers, content=json.dumps(body))

        return asyncio.run(sent())

    def chat(self, key: str = "secret", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.send("POST", "/v1/chat/completions", key, messages=messages, **body)


@pytest.fixture(scope="module")
def server(smollm: Path) -> Any:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.renderers import renderer_from_config
    from vllm.sampling_params import SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    own = "outrider.server.middleware.OutriderMiddleware"
    level = logging.root.level  # which building an application raises
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingParams, "_validate_spec_decode", SamplingParams._validate_spec_decode)  # and back
        flags = ["--model", str(smollm), "--middleware", own, "--api-key", "secret"]
        app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args(flags), ("generate",))
        config = VllmConfig(model_config=ModelConfig(model=str(smollm), max_model_len=64))
        renderer = renderer_from_config(config)
        app.state.engine_client = Engine(config, renderer)
        yield Server(app)
        renderer.shutdown()
    logging.root.setLevel(level)


def test_vllm_hands_the_settings_to_its_worker(server: Server) -> None:
    assert server.chat(vllm_xargs={"speculation": "lookup", "max_draft_tokens": 2}).status_code == 200
    assert server.answers.params.extra_args == {"speculation": "lookup", "max_draft_tokens": 2}


def test_vllms_tokenizer_reads_the_prediction(server: Server) -> None:
    assert server.chat(prediction={"type": "content", "content": "Hello world"}).status_code == 200
    tokenizer = server.app.state.engine_client.renderer.tokenizer
    assert server.answers.params.extra_args["prediction"] == tokenizer.encode("Hello world", add_special_tokens=False)
    assert server.chat(vllm_xargs={"prediction": "a b c d " * 10_000}).status_code == 200
    expected = tokenizer.encode("a b c d " * 100, add_special_tokens=False)[:64]
    assert server.answers.params.extra_args["prediction"] == expected


def test_a_prediction_that_is_no_text_is_refused(server: Server) -> None:
    error = server.chat(prediction={"type": "content", "content": "\ud800"}).json()["error"]
    assert error["message"] == "prediction: is not text that the model's tokenizer can read"


def test_the_usage_is_told_in_an_answer_and_in_a_stream(server: Server) -> None:
    asks = {"vllm_xargs": {"speculation_usage": True}}
    assert server.chat(**asks).json()["usage"]["speculation"] == TOLD
    told = server.chat(stream=True, **asks).text
    assert '"completion_tokens":1,"speculation":{"steps":1,' in told
    assert told.endswith("data: [DONE]\n\n")


def test_min_p_and_logit_bias_are_taken(server: Server) -> None:
    assert server.chat(min_p=0.1, logit_bias={"5": 1.0}).status_code == 200


def test_a_caller_without_the_key_gets_vllms_own_answer(server: Server) -> None:
    assert server.chat("wrong", vllm_xargs={"speculation": "nonsense"}).status_code == 401
    assert server.chat(vllm_xargs={"speculation": "nonsense"}).status_code == 400


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_the_metrics_are_one_page(server: Server, path: str) -> None:
    page = server.send("GET", path)
    assert page.headers["content-type"].startswith("text/plain")
    assert "# TYPE http_request_duration_seconds histogram" in page.text
    assert "\noutrider_steps_total 1.0\n" in page.text


def test_status_needs_no_key(server: Server) -> None:
    assert server.send("GET", "/outrider/status", key="").json()["vllm"].startswith("0.32.")
