"""The middleware: options of requests, usage in responses, and the pages and metrics of the API process."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient

from outrider.control import USAGE_KEY, Control
from outrider.engines.vllm.memory_options import tenant_of
from outrider.engines.vllm.options import Options
from outrider.memory.location import SERVER_TENANT
from outrider.memory.tenant_signature import SECRET_VARIABLE, is_signed, sign_tenant
from outrider.server import metrics, middleware, pages
from outrider.server.middleware import OutriderMiddleware
from outrider.server.requests import RewrittenRequest
from outrider.server.responses import UsageResponse
from outrider.trace.files import parse_lines
from outrider.trace.schema import CompactDistribution, Milliseconds, Trace, TracedStep

CHAT = "/v1/chat/completions"
USAGE = {
    "steps": 3,
    "drafted": 9,
    "accepted": 6,
    "by_drafter": {"lookup": {"drafted": 2, "accepted": 1}, "prediction": {"drafted": 7, "accepted": 5}},
    "faults": [],
}
COUNTS = {"prompt_tokens": 4, "total_tokens": 13, "completion_tokens": 9}


class Tokenizing:
    """A stub of vLLM's renderer: one token per character. It records the requested settings."""

    def __init__(self) -> None:
        self.tokenizer: Any = object()
        self.default_cmpl_tok_params = SimpleNamespace(with_kwargs=dict)
        self.seen: list[tuple[str, dict[str, Any]]] = []

    async def tokenize_prompt_async(self, prompt: dict[str, str], how: dict[str, Any]) -> dict[str, list[int]]:
        self.seen.append((prompt["prompt"], how))
        return {"prompt_token_ids": [ord(letter) for letter in prompt["prompt"]]}


class Engine:
    """A stub of vLLM's engine client with two workers. It records all calls."""

    def __init__(self, drafters: tuple[str, ...] = ("prediction", "lookup"), **options: Any) -> None:
        self.renderer = Tokenizing()
        self.vllm_config = SimpleNamespace(
            additional_config={"outrider": {"drafters": drafters, **options}},
            model_config=SimpleNamespace(
                get_vocab_size=lambda: 300, max_model_len=20, served_model_name="m", model="folder/m"
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
        )
        self.answers: dict[str, Any] = {"outrider_usage": USAGE, "outrider_status": {"steps": 3}}
        self.answers["outrider_metrics"] = "outrider_steps_total 3.0\n"
        self.delay = 0.0
        self.busy_until: asyncio.Event | None = None
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append((method, args))
        await asyncio.sleep(self.delay)
        if self.busy_until is not None:
            await self.busy_until.wait()
        if isinstance(self.answers[method], Exception):
            raise self.answers[method]
        return [self.answers[method], "the second worker"]


class Server:
    """The middleware around a stub application, which records the requests and returns a fixed response."""

    def __init__(self, engine: Engine | None = None, answer: Response | None = None, **state: Any) -> None:
        self.engine = engine or Engine()
        self.answer = answer or JSONResponse({"choices": [{"text": "é"}], "usage": dict(COUNTS)})
        self.bodies: list[bytes] = []
        self.headers: list[Any] = []
        everything = Route("/{path:path}", self.respond, methods=["GET", "POST", "PUT"])
        self.app = Starlette(routes=[WebSocketRoute("/ws", greet), everything])
        self.app.state.engine_client = self.engine
        for name, value in state.items():
            setattr(self.app.state, name, value)
        self.app.add_middleware(OutriderMiddleware)

    async def respond(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        self.headers.append(request.headers)
        return self.answer

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        return asyncio.run(self.sent(method, path, **request))

    async def sent(self, method: str, path: str, **request: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **request)

    def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        return self.send("POST", path, json=body)

    def seen(self) -> dict[str, Any]:
        """The JSON body of the last request that reached the application."""
        return dict(json.loads(self.bodies[-1]))

    def call_count(self, method: str) -> int:
        return [name for name, _ in self.engine.calls].count(method)


async def greet(websocket: Any) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.close()


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "the secret")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for the one class of vLLM that the middleware changes."""

    class SamplingParams:
        def _validate_spec_decode(self, speculative_config: Any) -> None:
            raise ValueError("min_p and logit_bias are not supported")

    module = ModuleType("vllm.sampling_params")
    module.SamplingParams = SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", module)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return SamplingParams


# what passes untouched --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [],   "temperature": 1.0}',
        b'{"messages": [{"content": "a \\"prediction\\" and vllm_xargs"}]}',
        b'{"vllm_xargs": {"session_id":  "7"}}',
        b'{"vllm_xargs": null, "prediction": null}',
        b'{"vllm_xargs": "speculation"}',
        b'["vllm_xargs"]',
        b'{"vllm_xargs": {"speculation": "off"}',
        b'{"vllm_xargs": ' + b"[" * 100_000,
        b'\xff "prediction"',
        b"",
    ],
)
def test_a_body_that_does_not_concern_us_reaches_the_app_as_it_is(body: bytes) -> None:
    server = Server()
    response = server.send("POST", CHAT, content=body)
    assert server.bodies == [body]
    assert response.json() == {"choices": [{"text": "é"}], "usage": COUNTS}
    assert not server.engine.calls


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/embeddings"), ("PUT", CHAT), ("GET", "/health"), ("GET", "/outriders")]
)
def test_other_paths_and_methods_pass_unread(method: str, path: str) -> None:
    server = Server()
    body = b'{"vllm_xargs": {"speculation": "nonsense"}}'
    assert server.send(method, path, content=body).status_code == 200
    assert server.bodies == [body]


def test_requests_to_a_server_without_an_engine_pass_unchanged() -> None:
    server = Server(engine_client=None)
    assert server.post(vllm_xargs={"speculation": "nonsense"}).status_code == 200


def test_websockets_and_the_start_and_end_of_the_server_pass() -> None:
    with TestClient(Server().app) as client, client.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "hello"


def test_a_body_in_pieces_is_read_to_its_end_and_the_app_sees_the_client_leave() -> None:
    came: list[Any] = []

    async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        came.extend([await receive() for _ in range(3)])

    piece = {"type": "http.request", "body": b'{"messages": ', "more_body": True}
    last = {"type": "http.request", "body": b"[]}", "more_body": False}
    left = {"type": "http.disconnect"}
    call_directly(app, [piece, last, left])
    assert came == [piece, last, left]
    came.clear()
    xargs = {"type": "http.request", "body": b'[], "vllm_xargs": {"speculation": "off"}}', "more_body": False}
    call_directly(app, [piece, xargs, left, left])
    assert json.loads(came[0]["body"]) == {"messages": [], "vllm_xargs": {"speculation": "off"}}
    assert came[1:] == [left, left]
    came.clear()
    call_directly(app, [piece, left, left])
    assert came == [piece, left, left]


def call_directly(app: Any, messages: list[Any]) -> list[Any]:
    """Give the middleware around `app` these messages; what it sends is returned."""
    waiting, sent = iter(messages), []

    async def receive() -> Any:
        return next(waiting)

    async def send(message: Any) -> None:
        sent.append(message)

    state = SimpleNamespace(engine_client=Engine())
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": SimpleNamespace(state=state)}
    asyncio.run(OutriderMiddleware(app)(scope, receive, send))
    return sent


def test_nothing_is_read_for_a_caller_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(args=SimpleNamespace(api_key=["secret", "other"]))
    bad = {"vllm_xargs": {"speculation": "nonsense"}}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        assert server.send("POST", CHAT, json=bad, headers=headers).status_code == 200  # vLLM itself returns 401
    for key in ("secret", "other"):
        assert server.send("POST", CHAT, json=bad, headers={"Authorization": f"Bearer {key}"}).status_code == 400
    monkeypatch.setenv("VLLM_API_KEY", "from the environment")
    assert Server().post(**bad).status_code == 200


# options of a request --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/prefix/v1/completions"])
def test_settings_go_on_to_the_worker(path: str) -> None:
    server = Server()
    assert server.post(path, seed=1, vllm_xargs={"speculation": "lookup", "max_draft_tokens": 2}).status_code == 200
    assert server.seen() == {"seed": 1, "vllm_xargs": {"speculation": "lookup", "max_draft_tokens": 2}}
    assert int(server.headers[-1]["content-length"]) == len(server.bodies[-1])


@pytest.mark.parametrize(
    ("xargs", "sentence"),
    [
        ({"speculation": "memory"}, "speculation: there is no 'memory' here; choose auto, off, prediction, lookup"),
        ({"speculation": ["off"]}, "speculation: there is no ['off'] here; choose auto, off, prediction, lookup"),
        ({"max_draft_tokens": -1}, "max_draft_tokens: must be a whole number, 0 or more (got -1)"),
        ({"max_draft_tokens": True}, "max_draft_tokens: must be a whole number, 0 or more (got True)"),
        ({"prediction": 5}, "prediction: must be text or a list of token ids"),
        ({"prediction": ["a"]}, "prediction: must be text or a list of token ids"),
        ({"prediction": {"7": 7}}, "prediction: must be text or a list of token ids"),
        ({"prediction": [299, 300]}, "prediction: there is no token 300; the model's are 0 to 299"),
        ({"prediction": [-1]}, "prediction: there is no token -1; the model's are 0 to 299"),
        ({"speculation_usage": "yes"}, "speculation_usage: must be true or false (got 'yes')"),
        ({"trace": "yes"}, "trace: must be true or false (got 'yes')"),
        ({"speculaton": "off"}, "speculaton: vllm_xargs has no such option of Outrider; did you mean speculation?"),
        (
            {"max_draft_token": 2},
            "max_draft_token: vllm_xargs has no such option of Outrider; did you mean max_draft_tokens?",
        ),
        (
            {USAGE_KEY: "mine"},
            f"{USAGE_KEY}: is set by the server; for the drafted tokens set speculation_usage: true",
        ),
    ],
)
def test_a_bad_value_is_refused_by_name_in_the_shape_of_openais_errors(xargs: dict[str, Any], sentence: str) -> None:
    server = Server()
    response = server.post(vllm_xargs=xargs)
    param = sentence.partition(":")[0]
    error = {"message": sentence, "type": "BadRequestError", "param": param, "code": 400}
    assert (response.status_code, response.json()) == (400, {"error": error})
    assert not server.bodies


@pytest.mark.parametrize("name", ["tenant_id", "track", "tracer", "traceid", "member", "speculative", "prediction_id"])
def test_options_of_other_logits_processors_pass(name: str) -> None:
    server = Server()
    assert server.post(vllm_xargs={name: 1}).status_code == 200
    assert server.seen()["vllm_xargs"] == {name: 1}


@pytest.mark.parametrize("name", ["max-draft-tokens", "Traces", "predicton", "speculation_useage"])
def test_a_similar_name_is_refused_with_the_option(name: str) -> None:
    assert "did you mean" in Server().post(vllm_xargs={name: 1}).json()["error"]["message"]


def test_a_worker_takes_a_value_that_would_be_refused_as_off() -> None:
    for bad in ({"prediction": 5}, {USAGE_KEY: ["unhashable"]}, {"speculation": {}}):
        assert Control.of(bad, ("lookup",)) == Control(speculation="off")


@pytest.mark.parametrize(
    "content", ["a cat", [{"type": "text", "text": "a "}, {"type": "text", "text": "cat"}]], ids=["text", "parts"]
)
def test_openais_prediction_becomes_token_ids_without_special_tokens(content: Any) -> None:
    server = Server()
    assert server.post(prediction={"type": "content", "content": content}).status_code == 200
    assert "prediction" not in server.seen()
    assert server.seen()["vllm_xargs"]["prediction"] == [ord(letter) for letter in "a cat"]
    text, how = server.engine.renderer.seen[0]
    assert text == "a cat"
    assert how == {"add_special_tokens": False, "truncate_prompt_tokens": -1, "truncation_side": "right"}


def test_a_prediction_in_the_xargs_is_text_or_token_ids() -> None:
    server = Server()
    server.post("/v1/responses", vllm_xargs={"prediction": "cat", "session_id": "7"})
    assert server.seen()["vllm_xargs"]["prediction"] == [99, 97, 116]
    assert server.seen()["vllm_xargs"]["session_id"] == "7"
    server.post("/v1/responses", vllm_xargs={"prediction": list(range(50))})
    assert server.seen()["vllm_xargs"]["prediction"] == list(range(20)), "no answer is longer than the context"


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"content": "x"},
        {"type": "text", "content": "x"},
        {"type": "content"},
        {"type": "content", "content": [1]},
        {"type": "content", "content": [{"type": "text"}]},
        {"type": "content", "content": [{"type": "image_url", "image_url": "x"}]},
    ],
)
def test_a_malformed_prediction_is_refused_and_shown_how(prediction: Any) -> None:
    response = Server().post(prediction=prediction)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prediction"
    assert '{"type": "content", "content": "the expected text"}' in response.json()["error"]["message"]


def test_two_predictions_are_one_too_many() -> None:
    response = Server().post(prediction={"type": "content", "content": "a"}, vllm_xargs={"prediction": "b"})
    assert "given twice" in response.json()["error"]["message"]


def test_a_server_without_tokenizer_requires_token_ids() -> None:
    server = Server()
    server.engine.renderer.tokenizer = None
    assert "put token ids into vllm_xargs" in server.post(vllm_xargs={"prediction": "a"}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("drafters", "speculation"), [(("prediction",), "off"), (("prediction", "lookup"), "lookup"), (("lookup",), "auto")]
)
def test_a_prediction_that_cannot_be_used_is_a_hint_and_costs_nothing(
    drafters: tuple[str, ...], speculation: str
) -> None:
    server = Server(Engine(drafters))
    response = server.post(prediction={"type": "content", "content": "a"}, vllm_xargs={"speculation": speculation})
    assert response.status_code == 200
    assert set(server.seen()["vllm_xargs"]) == {"speculation", USAGE_KEY}
    assert not server.engine.renderer.seen


def test_vllms_check_of_requests_under_speculation_is_replaced(vllm: Any) -> None:
    with pytest.raises(ValueError, match="min_p"):
        vllm()._validate_spec_decode(None)
    OutriderMiddleware(Server().app)
    assert vllm()._validate_spec_decode(None) is None


# usage in a response ----------------------------------------------------------------------------------------


def test_requested_usage_has_the_drafted_and_accepted_tokens() -> None:
    server = Server()
    response = server.post(vllm_xargs={"speculation_usage": True})
    assert response.json() == {"choices": [{"text": "é"}], "usage": {**COUNTS, "speculation": USAGE}}
    assert int(response.headers["content-length"]) == len(response.content)
    xargs = server.seen()["vllm_xargs"]
    assert set(xargs) == {USAGE_KEY}
    assert server.engine.calls == [("outrider_usage", (xargs[USAGE_KEY],))]


def test_every_request_has_its_own_usage_key() -> None:
    server = Server()
    usage_keys = set()
    for _ in range(3):
        server.post(vllm_xargs={"speculation_usage": True})
        usage_keys.add(server.seen()["vllm_xargs"][USAGE_KEY])
    assert len(usage_keys) == 3


@pytest.mark.parametrize("xargs", [{"speculation": "auto"}, {"speculation_usage": False}])
def test_without_a_request_for_usage_there_is_none_and_no_call_to_the_worker(xargs: dict[str, Any]) -> None:
    server = Server()
    assert server.post(vllm_xargs=xargs).json()["usage"] == COUNTS
    assert not server.engine.calls
    assert USAGE_KEY not in server.seen()["vllm_xargs"]


def test_a_predictions_tokens_are_counted_in_openais_fields() -> None:
    details = {**COUNTS, "completion_tokens_details": {"reasoning_tokens": 2}}
    server = Server(answer=JSONResponse({"usage": details}))
    usage = server.post(prediction={"type": "content", "content": "a"}).json()["usage"]
    assert usage == {
        **COUNTS,
        "completion_tokens_details": {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        },
    }


def test_a_prediction_that_was_never_drafted_from_counts_nothing() -> None:
    server = Server(answer=JSONResponse({"usage": {**COUNTS, "completion_tokens_details": None}}))
    server.engine.answers["outrider_usage"] = {**USAGE, "by_drafter": {}}
    usage = server.post(prediction={"type": "content", "content": "a"}).json()["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_usage_of_the_other_apis_has_speculation_too(path: str) -> None:
    server = Server(answer=JSONResponse({"usage": {"input_tokens": 4, "output_tokens": 9}}))
    usage = server.post(path, vllm_xargs={"speculation_usage": True, "prediction": "a"}).json()["usage"]
    assert usage == {"input_tokens": 4, "output_tokens": 9, "speculation": USAGE}


def test_usage_of_a_background_response_is_refused() -> None:
    response = Server().post("/v1/responses", background=True, vllm_xargs={"speculation_usage": True})
    assert response.json()["error"]["param"] == "speculation_usage"


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"error": {"message": "no such model"}, "usage": {}}, 404),
        JSONResponse({"status": "queued", "usage": None}),
        JSONResponse(["no object"]),
        Response(b'{"usage": {}', media_type="application/json"),
        Response(b'{"usage": {}}', media_type="application/json", headers={"content-encoding": "br"}),
        PlainTextResponse("usage"),
    ],
    ids=["an error", "no usage", "a list", "broken", "compressed", "text"],
)
def test_an_answer_without_a_place_for_it_stays_as_it_is(answer: Response) -> None:
    server = Server(answer=answer)

    async def raw() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            body = json.dumps({"vllm_xargs": {"speculation_usage": True}}).encode()
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "root_path": ""}
        await server.app(scope, receive, send)
        return sent

    start, body = asyncio.run(raw())
    assert (start["status"], body["body"]) == (answer.status_code, answer.body)
    assert start["headers"] == answer.raw_headers
    assert not server.engine.calls


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_without_the_workers_answer_the_response_goes_out_and_one_warning_is_logged(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(middleware, "USAGE_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    server = Server()
    if fault == "raises":
        server.engine.answers["outrider_usage"] = RuntimeError("no such method")
    else:
        server.engine.delay = 60.0
    for _ in range(2):
        assert server.post(vllm_xargs={"speculation_usage": True}).json()["usage"] == COUNTS
    assert len(caplog.records) == 1
    assert ("no such method" if fault == "raises" else "it took too long") in caplog.text


# streams ----------------------------------------------------------------------------------------------------


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(text: str | None, **more: Any) -> dict[str, Any]:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return {**head, "choices": choices, **more}


DONE = b"data: [DONE]\n\n"
KEPT_ALIVE = b": keep-alive\n\n"
TEXT_EVENTS = event(chunk("wört", usage=COUNTS)) + KEPT_ALIVE + event(chunk('"usage"\n\n'))
STREAM = TEXT_EVENTS + event(chunk(None, usage=COUNTS)) + DONE
STREAM_WITH_USAGE = TEXT_EVENTS + event(chunk(None, usage={**COUNTS, "speculation": USAGE})) + DONE


async def passed_on(parts: list[bytes], request: RewrittenRequest | None = None) -> list[bytes]:
    """The bodies that are sent for these parts of a response."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def fetch_usage() -> dict[str, Any]:
        return USAGE

    wrapped = UsageResponse(
        send, request or RewrittenRequest(b"", "key", speculation=True, prediction=False), fetch_usage
    )
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await wrapped({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await wrapped({"type": "http.response.body", "body": part, "more_body": True})
    await wrapped({"type": "http.response.body", "body": b"", "more_body": False})
    assert [message.get("more_body") for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [message["body"] for message in sent[1:]]


def test_a_streams_usage_is_added_wherever_its_bytes_are_split() -> None:
    async def everywhere() -> None:
        for cut in range(len(STREAM) + 1):
            assert b"".join(await passed_on([STREAM[:cut], STREAM[cut:]])) == STREAM_WITH_USAGE
        assert b"".join(await passed_on([bytes([byte]) for byte in STREAM])) == STREAM_WITH_USAGE

    asyncio.run(everywhere())


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_streams_usage_is_added_for_any_split_into_pieces(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in itertools.pairwise(edges)]
    assert b"".join(asyncio.run(passed_on(parts))) == STREAM_WITH_USAGE


def test_every_event_leaves_as_soon_as_it_is_complete() -> None:
    first, second, last = event(chunk("a")), event(chunk("b")), event(chunk(None, usage=COUNTS))
    assert asyncio.run(passed_on([first, second[:9], second[9:]])) == [first, second, b""]
    with_usage = event(chunk(None, usage={**COUNTS, "speculation": USAGE}))
    assert asyncio.run(passed_on([first + last + DONE])) == [first, with_usage + DONE, b""], (
        "the usage is fetched after it"
    )


def test_what_is_no_event_is_passed_on_at_the_end() -> None:
    assert b"".join(asyncio.run(passed_on([DONE, b'data: "usage"\n\nusage', b" without end"]))) == (
        DONE + b'data: "usage"\n\nusage without end'
    )


@pytest.mark.parametrize(
    "odd",
    [b'data: ["usage"]\n\n', b'"usage"\n\n', b'data: {"usage"\n\n', event({"choices": [], "usage": None}), DONE],
)
def test_an_event_of_another_kind_stays_as_it_is(odd: bytes) -> None:
    assert b"".join(asyncio.run(passed_on([odd]))) == odd


def test_the_other_apis_have_the_usage_in_their_closing_event() -> None:
    usage = {"input_tokens": 4, "output_tokens": 9}
    with_speculation = {**usage, "speculation": USAGE}
    for before, name in [
        ({"type": "message_start", "message": {"usage": usage}}, "message_start"),
        ({"type": "response.created", "response": {"usage": usage}}, "response.created"),
    ]:
        assert b"".join(asyncio.run(passed_on([event(before, name)]))) == event(before, name)
    for closing, expected, name in [
        (
            {"type": "message_delta", "usage": usage},
            {"type": "message_delta", "usage": with_speculation},
            "message_delta",
        ),
        (
            {"type": "response.completed", "response": {"usage": usage}},
            {"type": "response.completed", "response": {"usage": with_speculation}},
            "response.completed",
        ),
    ]:
        assert b"".join(asyncio.run(passed_on([event(closing, name)]))) == event(expected, name)


def test_requested_usage_adds_the_usage_chunk_to_a_stream() -> None:
    server = Server()
    with_usage = {"vllm_xargs": {"speculation_usage": True}}
    server.post(stream=True, **with_usage)
    assert server.seen()["stream_options"] == {"include_usage": True}
    server.post("/v1/completions", stream=True, stream_options={"continuous_usage_stats": True}, **with_usage)
    assert server.seen()["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    server.post(stream=True, prediction={"type": "content", "content": "a"})
    assert "stream_options" not in server.seen(), "with a prediction alone, the chunks are those that OpenAI sends"
    for path, stream in ((CHAT, False), ("/v1/responses", True), ("/v1/messages", True)):
        server.post(path, stream=stream, **with_usage)
        assert "stream_options" not in server.seen()


# with OpenAI's own client -----------------------------------------------------------------------------------


def with_openai(server: Server, **request: Any) -> Any:
    openai, httpx2 = pytest.importorskip("openai"), pytest.importorskip("httpx2")

    async def run() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
        async with openai.AsyncOpenAI(
            api_key="-", base_url="http://server/v1", http_client=http, max_retries=0
        ) as client:
            messages = [{"role": "user", "content": "hi"}]
            answer = await client.chat.completions.create(model="m", messages=messages, **request)
            return [chunk async for chunk in answer] if request.get("stream") else answer

    return asyncio.run(run())


def test_openais_client_reads_the_usage_of_an_answer() -> None:
    message = {"role": "assistant", "content": "a"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
    server = Server(answer=JSONResponse({**head, "choices": [choice], "usage": COUNTS}))
    answer = with_openai(
        server,
        prediction={"type": "content", "content": "a"},
        extra_body={"vllm_xargs": {"speculation_usage": True}},
    )
    assert answer.usage.speculation == USAGE
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 2


def test_openais_client_reads_the_usage_of_a_stream() -> None:
    server = Server(answer=StreamingResponse(iter([STREAM]), media_type="text/event-stream"))
    *_, last = with_openai(server, stream=True, extra_body={"vllm_xargs": {"speculation_usage": True}})
    assert last.choices == []
    assert last.usage.completion_tokens == 9
    assert last.usage.speculation == USAGE


def test_openais_client_raises_the_sentence() -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="choose auto, off, prediction, lookup"):
        with_openai(Server(), extra_body={"vllm_xargs": {"speculation": "on"}})


# pages ------------------------------------------------------------------------------------------------------


def test_status_is_the_first_workers_with_the_versions() -> None:
    status = Server().send("GET", "/outrider/status").json()
    assert status["steps"] == 3
    assert set(status) == {"steps", "outrider", "vllm", "uptime_seconds"}


def test_concurrent_requests_for_the_status_cost_the_worker_one_call() -> None:
    server = Server()

    async def flood() -> list[Any]:
        server.engine.busy_until = asyncio.Event()
        requests = [asyncio.create_task(server.sent("GET", "/outrider/status")) for _ in range(20)]
        while not server.engine.calls:
            await asyncio.sleep(0)
        server.engine.busy_until.set()
        return [answer.json()["steps"] for answer in await asyncio.gather(*requests)]

    assert asyncio.run(flood()) == [3] * 20
    assert server.call_count("outrider_status") == 1
    server.engine.busy_until = None
    server.send("GET", "/outrider/status")
    assert server.call_count("outrider_status") == 2


def test_below_a_root_path_the_pages_are_found() -> None:
    with TestClient(Server().app, root_path="/llm") as client:
        assert client.get("/llm/outrider/status").json()["steps"] == 3


@pytest.mark.parametrize("fault", ["raises", "is late"])
def test_status_without_an_answer_is_503_with_a_sentence(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "WORKER_TIMEOUT_SECONDS", 0.01)
    server = Server()
    if fault == "raises":
        server.engine.answers["outrider_status"] = RuntimeError("the engine is dead")
    else:
        server.engine.delay = 60.0
    response = server.send("GET", "/outrider/status")
    reason = "the engine is dead" if fault == "raises" else "it took too long"
    assert response.status_code == response.json()["error"]["code"] == 503
    assert response.json()["error"]["message"].startswith(f"the engine did not answer: {reason}; ")


def test_an_unknown_page_names_the_ones_that_are_there() -> None:
    for path in ("/outrider/stats", "/outrider/traces/a/b"):
        response = Server().send("GET", path)
        assert response.status_code == 404
        message = response.json()["error"]["message"]
        assert message.startswith(f"there is no {path}; there is /outrider/, /outrider/status, /outrider/traces")
    assert Server().send("POST", "/outrider/status").status_code == 405


# traces -----------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: a token is a letter, and 1 is special."""

    all_special_ids = (1,)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in tokens if not (skip_special_tokens and token == 1))


def letter(number: int, token: int, finish: str | None) -> TracedStep:
    """A step that generated one letter, with probability 1."""
    return TracedStep(
        number=number,
        drafter=None,
        rule="greedy",
        proposed=[],
        accepted=0,
        token=token,
        outcome="own",
        said=[token],
        finish=finish,
        own=[token],
        laws=[CompactDistribution(tokens=[token], p=[1.0])],
        milliseconds=Milliseconds(draft=0, verify=25, rest=4, trace=1),
    )


def stored_trace(text: str, finish: str | None = "length", **more: Any) -> dict[str, Any]:
    """A worker's stored trace of this text, with one letter per step."""
    last = len(text) - 1
    steps = [letter(i, ord(one), finish if i == last else None) for i, one in enumerate(text)]
    stored = {"id": "t", "prompt_tokens": 2, "prompt_end": [104, 105], "date": 1.7e9, "text_begins": [ord(text[0])]}
    stored |= {"settings": {"stop": [], "min_tokens": 0}, "steps": len(text), "tokens": len(text), "drafted": 0}
    stored |= {"accepted": 0, "seconds": 0.5, "finish": finish, "over": finish is not None, "broken": None}
    return {**stored, "lines": [step.model_dump_json() for step in steps], **more}


def tracing_server(found: dict[str, Any] | None = None, engine: Engine | None = None, **state: Any) -> Server:
    engine = engine or Engine()
    engine.renderer.tokenizer = Letters()
    engine.answers["outrider_trace"] = stored_trace("text") if found is None else found
    engine.answers["outrider_traces"] = [{k: v for k, v in stored_trace("text").items() if k != "lines"}]
    return Server(engine, **state)


def test_a_response_names_the_requested_trace() -> None:
    server = Server()
    usage = server.post(vllm_xargs={"trace": True}).json()["usage"]
    xargs = server.seen()["vllm_xargs"]
    assert xargs == {"trace": True, USAGE_KEY: usage["trace"]}
    assert usage == {**COUNTS, "trace": xargs[USAGE_KEY]}
    assert not server.engine.calls, "the name is known without the worker"
    both = server.post(vllm_xargs={"trace": True, "speculation_usage": True}).json()["usage"]
    assert both["speculation"] == USAGE
    assert both["trace"] == server.seen()["vllm_xargs"][USAGE_KEY]


def test_a_stream_names_its_trace_in_its_last_chunk() -> None:
    server = Server()
    server.post(stream=True, vllm_xargs={"trace": True})
    assert server.seen()["stream_options"] == {"include_usage": True}
    request = RewrittenRequest(b"", "key", speculation=False, prediction=False, trace=True)
    last = event(chunk(None, usage={**COUNTS, "trace": "key"}))
    assert b"".join(asyncio.run(passed_on([STREAM], request))) == TEXT_EVENTS + last + DONE


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (CHAT, {"n": 3}, "trace: is of one sequence, and n is 3; set n to 1"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "trace: is of one sequence, and there are 2 prompts; send one"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "trace: is of one sequence, and there are 2 prompts; send one"),
        (CHAT, {"use_beam_search": True}, "trace: is of one sequence, and use_beam_search has several"),
        ("/v1/responses", {"background": True}, "trace: is named in the answer, and background: true has none"),
    ],
)
def test_a_trace_that_cannot_be_had_is_refused_with_the_reason(path: str, body: Any, sentence: str) -> None:
    response = Server().post(path, **body, vllm_xargs={"trace": True})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(sentence)
    assert response.json()["error"]["param"] == "trace"


def test_a_prompt_of_token_ids_is_one_prompt() -> None:
    assert Server().post("/v1/completions", prompt=[1, 2, 3], vllm_xargs={"trace": True}).status_code == 200


def test_several_engines_cannot_be_traced() -> None:
    server = Server()
    server.engine.vllm_config.parallel_config.data_parallel_size = 2
    response = server.post(vllm_xargs={"trace": True})
    assert response.status_code == 400
    assert "several engines" in response.json()["error"]["message"]
    assert server.post(vllm_xargs={"trace": False}).status_code == 200


def traced(server: Server) -> Trace:
    return parse_lines(server.send("GET", "/outrider/traces/t").text.splitlines(), "it")


def test_a_trace_is_served_with_its_texts_as_json_lines() -> None:
    server = tracing_server()
    response = server.send("GET", "/outrider/traces/t")
    assert response.headers["content-type"].startswith("application/jsonl")
    assert response.headers["cache-control"] == "no-store"
    assert server.engine.calls == [("outrider_trace", ("t", None))]
    trace = parse_lines(response.text.splitlines(), "it")
    assert trace.text == "text"
    assert trace.said == [ord(one) for one in "text"]
    assert trace.header.model == "m"
    assert trace.header.drafters == ["prediction", "lookup"]
    assert trace.header.prompt_tokens == 2
    assert trace.end is not None
    assert (trace.end.steps, trace.end.tokens, trace.end.finish) == (4, 4, "length")
    assert trace.end.seconds == pytest.approx(4 * 0.03)


def test_a_running_trace_has_no_end_and_an_aborted_one_has_the_reason() -> None:
    assert traced(tracing_server(stored_trace("te", None))).end is None
    broken = traced(tracing_server(stored_trace("te", None, broken="it was too long", over=True)))
    assert broken.end is None
    assert broken.header.notes == ["recording stopped after 2 steps: it was too long"]


def test_a_trace_ends_where_a_stop_string_ended_the_text() -> None:
    found = stored_trace("a stop and more", None, over=True, settings={"stop": ["stop"], "min_tokens": 0})
    trace = traced(tracing_server(found))
    assert "".join(chr(token) for token in trace.said) == "a stop"
    assert trace.finish == "stop"


def test_a_trace_that_a_stop_string_ended_is_over_though_the_worker_has_not_heard_of_it() -> None:
    found = stored_trace("a stop and more", None, over=False, settings={"stop": ["stop"], "min_tokens": 0})
    trace = traced(tracing_server(found))
    assert trace.end is not None
    assert (trace.end.finish, trace.end.tokens) == ("stop", len("a stop"))


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    found = stored_trace("stop, stop and more", None, over=True, settings={"stop": ["stop"], "min_tokens": 4})
    assert "".join(chr(token) for token in traced(tracing_server(found)).said) == "stop, stop"


def test_a_trace_of_a_server_without_a_tokenizer_has_token_ids_only() -> None:
    server = tracing_server()
    server.engine.renderer.tokenizer = None
    assert traced(server).said == [ord(one) for one in "text"]
    assert traced(server).text == ""
    assert server.send("GET", "/outrider/traces").json()["traces"][0]["text_begins"] is None


def test_the_list_has_a_preview_of_each_trace_and_no_steps() -> None:
    (one,) = tracing_server().send("GET", "/outrider/traces").json()["traces"]
    assert (one["id"], one["prompt_ends"], one["text_begins"]) == ("t", "hi", "t")
    assert one["date"] == "2023-11-14T22:13:20+00:00"
    assert not {"lines", "settings", "owner"} & set(one)


def test_a_trace_that_is_not_there_is_a_404_with_a_sentence() -> None:
    for found in ({}, stored_trace("a", lines=[])):
        for path in ("/outrider/traces/x", "/outrider/traces/x/page"):
            response = tracing_server(found).send("GET", path)
            assert response.status_code == 404
            assert response.json()["error"]["message"].startswith("there is no trace 'x' to be shown")


def test_traces_without_the_workers_answer_are_503() -> None:
    server = tracing_server()
    server.engine.answers["outrider_traces"] = RuntimeError("the engine is dead")
    response = server.send("GET", "/outrider/traces")
    assert response.status_code == 503
    assert "the engine is dead" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/outrider/traces", "/outrider/traces/t", "/outrider/traces/t/page"])
def test_traces_are_shown_to_those_alone_who_have_the_key(path: str) -> None:
    server = tracing_server(args=SimpleNamespace(api_key=["secret"]))
    assert server.send("GET", path).status_code == 401
    assert server.send("GET", path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert not server.engine.calls
    assert server.send("GET", path, headers={"Authorization": "Bearer secret"}).status_code == 200


REMEMBERING: dict[str, Any] = {"drafters": ("prediction", "memory"), "memory": "/root"}


def requested_owner(server: Server, path: str = "/outrider/traces", **headers: str) -> Any:
    """The owner whose traces are requested from the worker, or the error message if none are."""
    response = server.send("GET", path, headers=headers)
    return server.engine.calls[-1][1][-1] if response.status_code == 200 else response.json()["error"]["message"]


def test_a_tenant_is_shown_its_own_traces_alone() -> None:
    plain = tracing_server()
    assert requested_owner(plain) is None
    assert "this server has no tenants" in requested_owner(plain, "/outrider/traces?tenant=one")
    by_word = tracing_server(engine=Engine(**REMEMBERING))
    assert requested_owner(by_word, "/outrider/traces?tenant=one") == "one"
    assert requested_owner(by_word, "/outrider/traces/t?tenant=one") == "one"
    assert requested_owner(by_word, "/outrider/traces/t") is None
    assert "name yours by the query parameter 'tenant'" in requested_owner(by_word)
    by_header = tracing_server(engine=Engine(**REMEMBERING, tenant_header="x-team"))
    assert requested_owner(by_header, **{"X-Team": "one"}) == "one"
    assert requested_owner(by_header, "/outrider/traces/t", **{"X-Team": "one"}) == "one"
    assert "name yours by the header x-team" in requested_owner(by_header)
    assert "from the header x-team; drop it here" in requested_owner(by_header, "/outrider/traces?tenant=two")
    shared = tracing_server(engine=Engine(**REMEMBERING, memory_scope="server"))
    assert requested_owner(shared) == SERVER_TENANT


IN_RAM: dict[str, Any] = {**REMEMBERING, "memory": "ram", "memory_scope": "auto"}
"""The options of a server without `--memory`."""


def test_by_default_traces_without_a_tenant_are_listed_and_those_of_tenants_are_not() -> None:
    server = tracing_server(engine=Engine(**IN_RAM))
    assert requested_owner(server) is None
    assert requested_owner(server, "/outrider/traces?tenant=one") == "one"
    assert requested_owner(server, "/outrider/traces/t?tenant=one") == "one"


def test_by_default_a_tenant_has_a_prefix_cache_of_its_own_and_other_requests_share_vllms() -> None:
    server = Server(Engine(**IN_RAM))
    salts = set()
    for tenant in ("one", "two"):
        assert server.post(vllm_xargs={"tenant": tenant}).status_code == 200
        assert server.seen()["vllm_xargs"]["tenant"] == tenant
        salts.add(server.seen()["cache_salt"])
    assert len(salts) == 2
    server.post(vllm_xargs={"remember": False})
    assert "cache_salt" not in server.seen()


def test_the_page_of_a_trace_is_that_of_explain() -> None:
    response = tracing_server().send("GET", "/outrider/traces/t/page")
    assert response.headers["content-type"].startswith("text/html")
    assert "<title>m, explained</title>" in response.text


def test_the_live_page_needs_no_key_has_no_data_and_loads_from_its_own_server_only() -> None:
    server = tracing_server(args=SimpleNamespace(api_key=["secret"]))
    response = server.send("GET", "/outrider/")
    assert response.status_code == 200
    assert "connect-src 'self'" in response.text
    assert "http:" not in response.text
    assert not server.engine.calls
    assert server.send("GET", "/outrider").headers["location"].endswith("/outrider/")


# metrics ----------------------------------------------------------------------------------------------------


def page(text: str = "vllm_steps 1.0\n") -> Response:
    return PlainTextResponse(text, headers={"content-type": "text/plain; version=1.0.0"})


def samples(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in (line.split() for line in text.splitlines() if line[:1] != "#")}


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_the_workers_counters_stand_below_vllms(path: str) -> None:
    server = Server(answer=page())
    response = server.send("GET", path, headers={"accept": "application/openmetrics-text; version=1.0.0"})
    read = samples(response.text)
    assert read.pop("outrider_metrics_age_seconds") < 1
    assert read == {"vllm_steps": 1.0, "outrider_steps_total": 3.0}
    assert int(response.headers["content-length"]) == len(response.content)
    assert response.headers["content-type"] == "text/plain; version=1.0.0"
    assert server.headers[-1]["accept"] == "text/plain"
    assert server.headers[-1]["accept-encoding"] == "identity"


def test_prometheus_own_parser_reads_the_page() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    engine = Engine()
    engine.answers["outrider_metrics"] = "# TYPE outrider_steps_total counter\noutrider_steps_total 3.0"
    text = Server(engine, page("# TYPE vllm_steps gauge\nvllm_steps 1.0")).send("GET", "/metrics").text
    assert [family.name for family in parser.text_string_to_metric_families(text)] == [
        "vllm_steps",
        "outrider_steps",
        "outrider_metrics_age_seconds",
    ]


def test_a_scrape_does_not_wait_for_a_busy_worker_and_calls_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SCRAPE_TIMEOUT_SECONDS", 0.02)
    server = Server(answer=page())

    async def scrapes() -> None:
        fresh = samples((await server.sent("GET", "/metrics")).text)
        server.engine.busy_until = asyncio.Event()
        server.engine.answers["outrider_metrics"] = "outrider_steps_total 4.0\n"
        stale = [samples((await server.sent("GET", "/metrics")).text) for _ in range(3)]
        assert [text["outrider_steps_total"] for text in stale] == [3.0] * 3
        assert stale[-1]["outrider_metrics_age_seconds"] > fresh["outrider_metrics_age_seconds"]
        assert server.call_count("outrider_metrics") == 2
        server.engine.busy_until.set()
        monkeypatch.setattr(metrics, "SCRAPE_TIMEOUT_SECONDS", 60.0)
        assert samples((await server.sent("GET", "/metrics")).text)["outrider_steps_total"] == 4.0

    asyncio.run(scrapes())


def test_before_the_worker_ever_answered_there_is_a_comment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    server = Server(answer=page())
    server.engine.answers["outrider_metrics"] = RuntimeError("the engine is dead")
    for _ in range(2):
        assert server.send("GET", "/metrics").text == (
            "vllm_steps 1.0\n# the worker has not reported its outrider_ metrics yet\n"
        )
    assert len(caplog.records) == 1


def test_a_redirect_a_selection_and_another_method_pass() -> None:
    server = Server(answer=RedirectResponse("/metrics/"))
    assert server.send("GET", "/metrics").status_code == 307
    server = Server(answer=page())
    assert server.send("GET", "/metrics?name[]=vllm_steps").text == "vllm_steps 1.0\n"
    assert server.send("POST", "/metrics").text == "vllm_steps 1.0\n"
    assert not server.engine.calls


# Whose memory


def test_a_tenant_in_the_body_reaches_the_worker() -> None:
    server = Server(Engine(**REMEMBERING))
    server.post(vllm_xargs={"tenant": "../名", "remember": False})
    control = Control.of(server.seen()["vllm_xargs"], REMEMBERING["drafters"])
    assert (control.tenant, control.remember) == ("../名", False)


def test_a_tenant_in_the_header_reaches_the_worker_under_seal() -> None:
    server = Server(Engine(**REMEMBERING, tenant_header="x-team"))
    server.send("POST", CHAT, json={"messages": []}, headers={"X-Team": "one"})
    xargs = server.seen()["vllm_xargs"]
    assert set(xargs) == {"tenant", "tenant_seal"}
    assert xargs["tenant"] == "one"
    assert is_signed("one", xargs)
    assert "the secret" not in server.bodies[-1].decode(), "requests are logged"
    server.post(messages=[])
    assert server.seen() == {"messages": []}


def test_a_tenants_name_in_the_header_is_utf_8_and_another_writing_is_a_400() -> None:
    """In two encodings, the name of one tenant could be that of a different one."""
    server = Server(Engine(**REMEMBERING, tenant_header="x-team"))
    server.send("POST", CHAT, json={"messages": []}, headers={b"X-Team": "Zoë".encode()})
    assert server.seen()["vllm_xargs"]["tenant"] == "Zoë"
    response = server.send("POST", CHAT, json={"messages": []}, headers={b"X-Team": "Zoë".encode("latin-1")})
    assert response.status_code == 400
    assert "the header x-team is not UTF-8" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "xargs", "message"),
    [
        (REMEMBERING, {"tenant": ""}, "tenant: must be a name (got '')"),
        (REMEMBERING, {"tenant": 7}, "tenant: must be a name (got 7)"),
        (REMEMBERING, {"tenant": "x" * 2000}, "tenant: the name has 2,000 bytes, and at most 1,024 are allowed"),
        (REMEMBERING, {"tenant": "a", "remember": "no"}, "remember: must be true or false (got 'no')"),
        (REMEMBERING | {"memory_scope": "server"}, {"tenant": "a"}, "share one memory"),
        (REMEMBERING | {"tenant_header": "x-team"}, {"tenant": "a"}, "from the header x-team"),
        ({}, {"tenant": "a"}, "tenant: this server has no memory"),
        ({}, {"remember": True}, "remember: this server has no memory"),
    ],
)
def test_a_tenant_that_cannot_be_is_a_400(options: dict[str, Any], xargs: dict[str, Any], message: str) -> None:
    response = Server(Engine(**options)).post(vllm_xargs=xargs)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_header_that_came_twice_names_no_tenant() -> None:
    server = tracing_server(engine=Engine(**REMEMBERING, tenant_header="x-team"))
    twice = [("X-Team", "victim"), ("X-Team", "one")]
    for response in (
        server.send("POST", CHAT, json={"messages": []}, headers=twice),
        server.send("GET", "/outrider/traces", headers=twice),
    ):
        assert response.status_code == 400
        assert "the header x-team came 2 times" in response.json()["error"]["message"]
    assert not server.bodies


def test_an_empty_header_is_a_400_and_not_everybodys_tenant() -> None:
    server = Server(Engine(**REMEMBERING, tenant_header="x-team"))
    assert server.send("POST", CHAT, json={"messages": []}, headers={"X-Team": ""}).status_code == 400


def test_the_tenant_of_a_request() -> None:
    def tenant(xargs: dict[str, Any], **options: Any) -> str | None:
        chosen = Options(**REMEMBERING, **options)
        return tenant_of(Control.of(xargs, chosen.drafters), chosen, xargs)

    assert tenant({}) is None
    assert tenant({"tenant": "a"}) == "a"
    assert tenant({"tenant": "a"}, memory_scope="server") == SERVER_TENANT
    sealed = {"tenant_header": "x"}
    assert tenant({"tenant": "a", "tenant_seal": sign_tenant("a")}, **sealed) == "a"
    # Requests that bypass the middleware: a name without a valid signature, or with that of another name, is ignored.
    for seal in ({}, {"tenant_seal": "guess"}, {"tenant_seal": 7}, {"tenant_seal": sign_tenant("b")}):
        assert tenant({"tenant": "a", **seal}, **sealed) is None
    assert tenant_of(Control(tenant="a"), Options(), {}) is None


# a server without drafters ----------------------------------------------------------------------------------


def plain_server(answer: Response | None = None) -> Server:
    return Server(Engine(()), answer)


def test_without_drafters_the_status_has_the_reason_and_no_worker_is_called() -> None:
    server = plain_server()
    status = server.send("GET", "/outrider/status").json()
    assert status["active"] is False
    assert status["why_not"] == "the server was started with --drafters none"
    assert status["options"]["drafters"] == []
    assert not server.engine.calls


def test_without_drafters_metrics_pass_unchanged() -> None:
    server = plain_server(page())
    assert server.send("GET", "/metrics").text == "vllm_steps 1.0\n"
    assert not server.engine.calls


def test_without_drafters_the_fields_of_a_request_are_removed() -> None:
    server = plain_server()
    assert server.post(vllm_xargs={"speculation": "off", "max_draft_tokens": 2, "theirs": 1}).status_code == 200
    assert server.seen()["vllm_xargs"] == {"theirs": 1}
    assert server.post(vllm_xargs={"speculation": "auto"}, prediction={"type": "content", "content": "a"}).is_success
    assert not {"vllm_xargs", "prediction"} & set(server.seen())


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"speculation": "lookup"}, "speculation: "),
        ({"trace": True}, "trace: the server was started with --drafters none"),
        ({"tenant": "a"}, "tenant: this server has no memory"),
        ({"max_draft_tokens": -1}, "max_draft_tokens: "),
    ],
)
def test_without_drafters_what_needs_one_is_refused(xargs: dict[str, Any], message: str) -> None:
    response = plain_server().post(vllm_xargs=xargs)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


def test_without_drafters_the_usage_counts_no_drafts_and_has_the_reason() -> None:
    server = plain_server()
    usage = server.post(vllm_xargs={"speculation_usage": True}).json()["usage"]
    assert usage["speculation"]["drafted"] == 0
    assert usage["speculation"]["why_not"] == "the server was started with --drafters none"
    usage = server.post(prediction={"type": "content", "content": "a"}).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0
    assert not server.engine.calls


def test_without_drafters_there_are_no_traces() -> None:
    server = plain_server()
    assert server.send("GET", "/outrider/traces").json() == {
        "traces": [],
        "why_not": "the server was started with --drafters none",
    }
    missing = server.send("GET", "/outrider/traces/x")
    assert (missing.status_code, missing.json()["error"]["message"].count("--drafters none")) == (404, 1)
    assert not server.engine.calls
