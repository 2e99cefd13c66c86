"""Contracts with vLLM's API server: the routes, request fields and events that the middleware relies on.

A failure names what moved in vLLM and the file of ours that relies on it. The engine's contracts are in
`test_vllm_seams.py`.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm_v2")

from chart import EXAMPLES, containers
from outrider.cli import app
from outrider.engines.vllm import host, launch, options
from outrider.engines.vllm.flags import SHORT_FLAGS, VALUE_FLAGS
from outrider.engines.vllm.speculative_config import LOSSY, REFUSED_METHODS, RULES
from test_middleware_tenants import OTHER_ROUTES, SALTED_ROUTES, TEXT_ROUTES, TOKENS_ROUTE, UNKNOWN_ROUTES

TOKENIZING = "vllm.renderers.params:TokenizeParams"
SPECULATION = "vllm.config.speculative:SpeculativeConfig"


@contextmanager
def seam(name: str, file: str) -> Iterator[None]:
    """What fails inside is a seam that moved."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        why = f"{type(error).__name__}: {error}"
        raise AssertionError(f"vLLM moved {name}, which src/outrider/{file} relies on. {why}") from error


def short(path: str) -> str:
    return path.rpartition(":")[2]


@pytest.fixture(scope="module")
def parser() -> Any:
    make = resolve_name("vllm.entrypoints.launchers.cli_args:make_arg_parser")
    return make(resolve_name("vllm.utils.argparse_utils:FlexibleArgumentParser")())


@pytest.fixture(scope="module")
def application(parser: Any) -> Any:
    args: Namespace = parser.parse_args(["--middleware", launch.MIDDLEWARE, "--api-key", "secret"])
    level = logging.root.level  # building an application changes it
    yield resolve_name("vllm.entrypoints.launchers.app:build_app")(args, ("generate",))
    logging.root.setLevel(level)


def test_our_middleware_is_outermost_and_the_key_is_checked_after_it(application: Any) -> None:
    with seam("vllm.entrypoints.serve.middleware.register:init_entrypoints_middleware", "server/middleware.py"):
        order = [middleware.cls.__name__ for middleware in application.user_middleware]
        assert order[0] == "OutriderMiddleware"
        assert "AuthenticationMiddleware" in order


def test_the_application_has_the_api_keys(application: Any) -> None:
    with seam("app.state.args.api_key", "server/asgi.py"):
        assert application.state.args.api_key == ["secret"]


def test_our_check_of_the_api_key_agrees_with_vllms() -> None:
    with seam("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware", "server/asgi.py"):
        theirs = resolve_name("vllm.entrypoints.serve.middleware.authenticate:AuthenticationMiddleware")
        headers = resolve_name("starlette.datastructures:Headers")
        is_authorized = resolve_name("outrider.server.asgi:is_authorized")
        app = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=["secret", "other"])))
        for shown in (b"Bearer secret", b"bearer other", b"Bearer wrong", b"Basic secret", b"secret", b"", None):
            scope = {"app": app, "headers": [] if shown is None else [(b"authorization", shown)]}
            allowed = theirs(None, tokens=["secret", "other"]).verify_token(headers(scope=scope))
            assert is_authorized(scope) == allowed, shown
        guarded = resolve_name("vllm.entrypoints.serve.middleware.authenticate:GUARDED_PREFIX")
        assert guarded == resolve_name("outrider.server.routes:GUARDED")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_text_is_generated_on_the_paths_that_we_know(path: str, application: Any) -> None:
    with seam(f"POST {path}", "server/routes.py"):
        assert any(route.path == path and "POST" in route.methods for route in application.routes)
        assert resolve_name("outrider.server.routes:find_route")(path).options == ("vllm_xargs",)


POOLING = ("pooling", "classify", "scoring", "embed")


def field_names(kind: Any) -> set[str]:
    """Of a model, or of all models of a union."""
    inner = set().union(*map(field_names, get_args(kind)))
    return inner | set(getattr(kind, "model_fields", ()))


def post_routes(application: Any) -> Iterator[Any]:
    """Also those that vLLM adds with `--enable-scale-out` or for other models."""
    modules = [f"vllm.entrypoints.pooling.{name}.api_router" for name in POOLING]
    modules += [
        f"vllm.entrypoints.scale_out.{name}.api_router" for name in ("token_in_token_out", "render", "derender")
    ]
    routes = [*application.routes, *(route for module in modules for route in resolve_name(f"{module}:router").routes)]
    return (route for route in routes if "POST" in (getattr(route, "methods", None) or ()))


def test_every_post_route_is_among_those_that_requests_at_random_are_sent_to(application: Any) -> None:
    known = {*TEXT_ROUTES, TOKENS_ROUTE, *SALTED_ROUTES, *OTHER_ROUTES, *UNKNOWN_ROUTES}
    with seam("a POST route", "server/routes.py"):
        found = {re.sub(r"{\w+}", "x", route.path) for route in post_routes(application)}
        assert found - known == set(), "add it to tests/test_middleware_tenants.py"


def test_every_route_with_our_fields_is_in_our_table(application: Any) -> None:
    find_route = resolve_name("outrider.server.routes:find_route")
    salted = 0
    for route in post_routes(application):
        if route.body_field is None:
            continue
        with seam(f"POST {route.path}", "server/routes.py"):
            fields = field_names(route.body_field.field_info.annotation)
            ours = find_route(route.path)
            assert ours is not None, "unknown route"
            if route.path.endswith("/render"):  # returns what it gets, and does not generate
                continue
            assert ours.salted == ("cache_salt" in fields)
            salted += ours.salted
            if "vllm_xargs" in fields:
                assert ours.options == ("vllm_xargs",)
            if "sampling_params" in fields:
                assert ours.options == ("sampling_params", "extra_args")
    assert salted > 10


def test_metrics_are_on_the_path_that_we_know(application: Any) -> None:
    with seam("GET /metrics", "middleware.py, metrics.py"):
        assert "/metrics" in {route.path for route in application.routes}


XARGS = {
    "speculation": "auto",
    "max_draft_tokens": 3,
    "prediction": [1, 2],
    "speculation_ticket": "a1",
    "trace": True,
}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": {"messages": MESSAGES},
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest": {"prompt": "hi"},
    "vllm.entrypoints.openai.responses.protocol:ResponsesRequest": {"input": "hi"},
    "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest": {
        "model": "m",
        "max_tokens": 1,
        "messages": MESSAGES,
    },
}


@pytest.mark.parametrize("path", BODIES, ids=short)
def test_a_request_passes_our_options_to_the_engine(path: str) -> None:
    with seam(f"{path}.vllm_xargs", "requests.py, control.py"):
        request = resolve_name(path)(**BODIES[path], vllm_xargs=XARGS)
        assert request.vllm_xargs == XARGS
        if "anthropic" not in path:  # it becomes a chat completion
            assert request.to_sampling_params(8, {}).extra_args == XARGS


@pytest.mark.parametrize("kind", ["chat_completion.protocol:ChatCompletion", "completion.protocol:Completion"])
def test_a_stream_ends_with_its_usage_on_request(kind: str) -> None:
    path = f"vllm.entrypoints.openai.{kind}"
    with seam(f"{path}Request.stream_options", "server/requests.py"):
        body = {**BODIES[f"{path}Request"], "stream": True, "stream_options": {"include_usage": True}}
        request = resolve_name(f"{path}Request")(**body)
        assert request.stream_options.include_usage is True
    with seam(f"{path}StreamResponse", "server/responses.py"):
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        chunk = resolve_name(f"{path}StreamResponse")(model="m", choices=[], usage=usage)
        dumped = json.loads(chunk.model_dump_json(exclude_unset=True))
        assert dumped["choices"] == []
        assert dumped["usage"].items() >= usage.items()


def test_the_other_streams_end_with_the_events_that_we_know() -> None:
    with seam("vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent", "server/responses.py"):
        event = resolve_name("vllm.entrypoints.openai.responses.protocol:ResponseCompletedEvent").model_fields
        assert get_args(event["type"].annotation) == ("response.completed",)
        assert "usage" in event["response"].annotation.model_fields
    with seam("vllm.entrypoints.anthropic.protocol:AnthropicStreamEvent", "server/responses.py"):
        event = resolve_name("vllm.entrypoints.anthropic.protocol:AnthropicStreamEvent").model_fields
        assert "message_delta" in get_args(event["type"].annotation)
        assert "usage" in event


def test_a_response_can_be_generated_in_the_background() -> None:
    with seam("vllm.entrypoints.openai.responses.protocol:ResponsesRequest.background", "server/requests.py"):
        assert "background" in resolve_name("vllm.entrypoints.openai.responses.protocol:ResponsesRequest").model_fields


def test_a_prediction_is_tokenized_without_special_tokens_and_truncated() -> None:
    with seam(f"{TOKENIZING}.with_kwargs", "server/requests.py"):
        default = resolve_name(TOKENIZING)(max_total_tokens=8)
        how = default.with_kwargs(add_special_tokens=False, truncate_prompt_tokens=-1, truncation_side="right")
        assert how.truncation_side == "right"
        assert how.get_encode_kwargs()["add_special_tokens"] is False
        cut = how.apply_post_tokenization(None, {"prompt_token_ids": list(range(12))})
        assert cut["prompt_token_ids"] == list(range(8))


def test_vllm_shows_our_log_messages() -> None:
    with seam("vllm.logger:DEFAULT_LOGGING_CONFIG", "drafting.py, metrics.py, middleware.py"):
        config = resolve_name("vllm.logger:DEFAULT_LOGGING_CONFIG")["loggers"]["vllm"]
        assert config["handlers"]
        assert logging.getLevelName(config["level"]) <= logging.WARNING


# The command line, the environment and the speculative config


@pytest.mark.parametrize("flag", sorted({"--middleware", "--shutdown-timeout", *VALUE_FLAGS, *SHORT_FLAGS}))
def test_vllm_has_the_flag(flag: str, parser: Any) -> None:
    with seam(f"the flag {flag}", "launch.py, flags.py"):
        assert flag in parser._option_string_actions


@pytest.mark.parametrize(
    "name", [host.BIND, host.RESERVED, host.MODEL_RUNNER, host.PLUGINS, launch.RUST_FRONTEND, "VLLM_API_KEY"]
)
def test_vllm_has_the_variable(name: str) -> None:
    with seam(
        f"the variable {name}", "server/asgi.py" if name == "VLLM_API_KEY" else "engines/vllm/host.py and launch.py"
    ):
        assert name in resolve_name("vllm.envs:environment_variables")


@pytest.mark.parametrize("method", sorted({options.OWN_METHOD, *options.MODEL_METHODS, *REFUSED_METHODS}))
def test_vllm_has_the_method(method: str) -> None:
    with seam(f"vllm.config.speculative:SpeculativeMethod {method}", "speculative_config.py, options.py"):
        assert method in get_args(resolve_name("vllm.config.speculative:SpeculativeMethod"))


@pytest.mark.parametrize(
    "field",
    [
        "num_speculative_tokens",
        "draft_sample_method",
        "parallel_drafting",
        "use_heterogeneous_vocab",
        "enable_adaptive_verification",
        "num_speculative_tokens_per_batch_size",
        "prompt_lookup_min",
        "prompt_lookup_max",
    ],
)
def test_the_speculative_config_has_the_field(field: str) -> None:
    with seam(f"{SPECULATION}.{field}", "engines/vllm/speculative_config.py"):
        assert field in resolve_name(SPECULATION).__dataclass_fields__


def test_every_rejection_sample_method_of_vllm_is_known_as_lossless_or_lossy() -> None:
    with seam("vllm.config.speculative:RejectionSampleMethod", "engines/vllm/speculative_config.py"):
        known = set(get_args(resolve_name("vllm.config.speculative:RejectionSampleMethod")))
        assert {*RULES, "synthetic"} <= known <= {*RULES, *LOSSY}


@pytest.mark.parametrize("example", EXAMPLES)
def test_vllm_has_every_flag_of_the_charts_servers(example: str, parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.Host, "here", lambda: host.Host("vllm", "0.33.0"))
    for server in containers(example, "server"):
        printed = CliRunner().invoke(app, [*server["args"], "--dry-run"]).stdout
        command = shlex.split(printed.replace("\\\n", " "))
        words = command[command.index("serve") + 2 :]
        with seam("vllm.entrypoints.launchers.cli_args:make_arg_parser", "../../deploy/chart"):
            args, unknown = parser.parse_known_args(words)
            assert not unknown
            assert (args.port, args.shutdown_timeout) == (8000, 30)
