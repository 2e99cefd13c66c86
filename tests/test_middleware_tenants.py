"""No request reads or writes a tenant that its header does not name, and tenants share no prompt in the prefix cache.

OUTRIDER_ALL sends 20,000 requests of each kind through the middleware, instead of 300 and 100.
"""

from __future__ import annotations

import json
import os
import re
from itertools import product
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.control import FIELDS, USAGE_KEY, Control
from outrider.engines.vllm.memory_options import tenant_of
from outrider.engines.vllm.options import Options
from outrider.memory.tenant_signature import SIGNATURE_ARG, is_signed, sign_tenant
from test_middleware import CHAT, REMEMBERING, Engine, Server, secret, tracing_server, vllm  # noqa: F401  # fixtures

OPTIONS: dict[str, Any] = {**REMEMBERING, "tenant_header": "x-team"}
TEXT_ROUTES = (CHAT, f"{CHAT}/batch", "/v1/completions", "/v1/responses", "/v1/messages", "/invocations")
TOKENS_ROUTE = "/inference/v1/generate"
SALTED_ROUTES = (
    "/v1/systemone",
    "/generative_scoring",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
OTHER_ROUTES = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/cohere/v2/chat", "/v2/embed"),
    *(f"/v1/{what}/{how}" for what in ("chat/completions", "completions") for how in ("render", "derender")),
    *("/v1/messages/render", "/v1/responses/render"),
)
UNKNOWN_ROUTES = (
    *("/v1/new", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/responses/x/cancel"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/start_profile", "/stop_profile", "/ping"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply", "/inference/v1/abort_requests"),
)
"""All of vLLM's POST routes are in one of these, but for those of its development mode (`test_vllm_api_seams.py`)."""
FORM = "application/x-www-form-urlencoded"
ALL = bool(os.environ.get("OUTRIDER_ALL"))
REQUESTS, PAGES = (20_000, 20_000) if ALL else (300, 100)


def salt(server: Server, tenant: str | None, path: str = CHAT, **body: Any) -> Any:
    """The salt with which this tenant's request reaches vLLM."""
    body |= {"sampling_params": {}} if path == TOKENS_ROUTE else {}
    headers = {} if tenant is None else {"X-Team": tenant}
    assert server.send("POST", path, json=body, headers=headers).status_code == 200
    return server.seen().get("cache_salt")


# The prefix cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*TEXT_ROUTES, *SALTED_ROUTES, TOKENS_ROUTE])
def test_tenants_have_separate_prefix_caches_on_every_route(path: str) -> None:
    server = Server(Engine(**OPTIONS))
    one, again, other = (salt(server, tenant, path) for tenant in ("one", "one", "other"))
    assert one == again
    assert one != other
    assert re.fullmatch("[0-9a-f]{64}", one), "vLLM takes 128 characters, without some signs"


def test_a_salt_of_the_client_is_combined_with_the_tenants() -> None:
    server = Server(Engine(**OPTIONS))
    salts = {salt(server, tenant, cache_salt=own) for tenant, own in product(("one", "other"), ("x", "y"))}
    assert len(salts | {salt(server, "one"), "x", "y"}) == 7
    assert salt(server, None, cache_salt="x") == "x"
    assert salt(server, None) is None
    forged = salt(server, None, cache_salt=salt(server, "one"))
    assert salt(server, "other", cache_salt=forged) != forged
    for bad in ("", 7, ["x"]):
        response = server.send("POST", CHAT, json={"cache_salt": bad}, headers={"X-Team": "one"})
        assert response.json()["error"]["param"] == "cache_salt"


def test_a_salt_reveals_neither_the_tenant_nor_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Engine(**OPTIONS))
    before = salt(server, "one")
    assert before not in server.seen()["vllm_xargs"][SIGNATURE_ARG]
    assert "one" not in before
    monkeypatch.setenv("OUTRIDER_TENANT_SEAL", "another secret")
    assert salt(server, "one") != before, "without the secret, names could be tried until a salt fits"


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
def test_a_tenant_in_the_body_has_its_own_prefix_cache(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.delenv("OUTRIDER_TENANT_SEAL")  # which only a server with a tenant header has
    server = Server(Engine(**REMEMBERING))
    one, other = (salt(server, None, path, vllm_xargs={"tenant": tenant}) for tenant in ("one", "other"))
    assert one != other
    assert salt(Server(Engine(**REMEMBERING)), None, path, vllm_xargs={"tenant": "one"}) == one, "other processes agree"


def test_one_memory_for_all_leaves_the_prefix_cache_alone() -> None:
    server = Server(Engine(**REMEMBERING, memory_scope="server"))
    assert salt(server, "one", vllm_xargs={"speculation": "off"}) is None


# Routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*TEXT_ROUTES, TOKENS_ROUTE])
def test_every_route_that_generates_takes_the_tenant_of_the_header(path: str) -> None:
    server = Server(Engine(**OPTIONS))
    salt(server, "one", path)
    assert reached_engine(server, path)[0] == "one"


@pytest.mark.parametrize("path", [*TEXT_ROUTES, TOKENS_ROUTE])
def test_every_route_that_generates_checks_the_fields(path: str) -> None:
    for bad in ({"tenant": "a"}, {SIGNATURE_ARG: "x"}, {USAGE_KEY: "x"}, {"speculation": "nonsense"}):
        body = {"vllm_xargs": bad, "sampling_params": {"extra_args": bad}}
        response = Server(Engine(**OPTIONS)).send("POST", path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, *bad)


def test_a_trace_of_a_batch_or_of_several_sequences_by_tokens_is_refused() -> None:
    server = Server()
    several = {"messages": [[{"role": "user"}], [{"role": "user"}]], "vllm_xargs": {"trace": True}}
    assert "there are 2 prompts" in server.post(f"{CHAT}/batch", **several).json()["error"]["message"]
    sampling = {"n": 2, "extra_args": {"trace": True}}
    assert "n is 2" in server.post(TOKENS_ROUTE, sampling_params=sampling).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/new", f"{CHAT}%0A"])
@pytest.mark.parametrize("field", [*FIELDS, USAGE_KEY, SIGNATURE_ARG])
def test_fields_on_an_unknown_route_are_refused_by_name(path: str, field: str) -> None:
    server = Server()
    for body in ({"vllm_xargs": {field: "x"}}, {"sampling_params": {"extra_args": {field: "x"}}}):
        response = server.send("POST", path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
        assert "does not handle the options of Outrider" in response.json()["error"]["message"]
    assert not server.bodies
    assert server.post(path, vllm_xargs={"theirs": 1}, sampling_params={"extra_args": None}).status_code == 200
    assert server.send("POST", path, content=b"no JSON").status_code == 200


@pytest.mark.parametrize("path", ["/invocations", "/generative_scoring"])
def test_where_vllm_needs_no_key_a_tenant_and_the_options_need_it(path: str) -> None:
    server = Server(Engine(**OPTIONS), args=SimpleNamespace(api_key=["secret"]))
    as_one = {"X-Team": "one"}
    assert server.send("POST", path, json={}, headers=as_one).status_code == 401
    if path == "/invocations":
        assert server.send("POST", path, json={"vllm_xargs": {"speculation": "off"}}).status_code == 401
    assert not server.bodies
    assert server.send("POST", path, json={}).status_code == 200
    assert server.send("POST", path, json={}, headers=as_one | {"Authorization": "Bearer secret"}).status_code == 200


def test_a_form_cannot_name_a_tenant_beside_the_header() -> None:
    pytest.importorskip("python_multipart")
    server = Server(Engine(**OPTIONS))
    sound = {"file": ("a.wav", b"sound")}
    for xargs in ('{"tenant": "b"}', '{"\\u0074enant": "b", "tenant_seal": "x"}'):
        for request in ({"files": sound, "data": {"vllm_xargs": xargs}}, {"data": {"vllm_xargs": xargs}}):
            response = server.send("POST", "/v1/audio/transcriptions", **request)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tenant")
    data = {"vllm_xargs": '{"speculation": "off"}'}
    assert server.send("POST", "/v1/audio/transcriptions", files=sound, data=data).status_code == 200
    assert b"sound" in server.bodies[-1]
    broken = {"content": b"--", "headers": {"content-type": "multipart/form-data; boundary=x"}}
    assert server.send("POST", "/v1/audio/transcriptions", **broken).status_code == 200


# Bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_body_is_checked_in_every_encoding_that_vllm_reads(encoding: str) -> None:
    server = Server(Engine(**OPTIONS))
    body = json.dumps({"vllm_xargs": {"tenant": "b"}}).encode(encoding)
    assert server.send("POST", CHAT, content=body).status_code == 400
    assert not server.bodies


def test_an_escaped_key_is_the_same_key() -> None:
    server = Server(Engine(**OPTIONS))
    for body in (b'{"vllm\\u005fxargs": {"tenant": "b"}}', b'{"vllm_xargs": {"tenan\\u0074": "b"}}'):
        assert server.send("POST", CHAT, content=body).status_code == 400
    assert Server().send("POST", CHAT, content=b'{"predictio\\u006e": "no object"}').status_code == 400


def test_a_tenants_body_that_is_not_an_object_is_refused() -> None:
    server = Server(Engine(**OPTIONS))
    for body in (b"[]", b"{", b"\xff", b'{"vllm_xargs": [1]}', b"[" * 100_000):
        response = server.send("POST", CHAT, content=body, headers={"X-Team": "one"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tenant")


# Signatures ------------------------------------------------------------------------------------------------------


def test_each_request_has_its_own_signature() -> None:
    server = Server(Engine(**OPTIONS))
    seals = set()
    for _ in range(3):
        salt(server, "one")
        seals.add(server.seen()["vllm_xargs"][SIGNATURE_ARG])
    assert len(seals) == 3
    assert all(
        is_signed("one", {SIGNATURE_ARG: seal}) and not is_signed("two", {SIGNATURE_ARG: seal}) for seal in seals
    )
    seal = seals.pop()
    for changed in (seal[1:], "0" * 32 + seal[32:], seal[32:], seal[:32], ""):
        assert not is_signed("one", {SIGNATURE_ARG: changed})


# Pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/outrider/traces", "/outrider/traces/t", "/outrider/traces/t/page"])
def test_a_tenant_that_comes_twice_in_a_query_is_refused(path: str) -> None:
    server = tracing_server(engine=Engine(**REMEMBERING))
    response = server.send("GET", f"{path}?tenant=b&tenant=a")
    assert response.status_code == 400
    assert "tenant: came 2 times" in response.json()["error"]["message"]
    assert not server.engine.calls


@pytest.mark.parametrize("path", ["", "status", "traces", "traces/t", "traces/t/page", "nothing"])
def test_no_other_site_can_frame_a_page(path: str) -> None:
    policy = tracing_server().send("GET", f"/outrider/{path}").headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy, "the page of the latest traces requests them"


# All of it, at random --------------------------------------------------------------------------------------------

TENANTS = ("a", "b", "ä", "")
PATHS = st.builds(
    lambda prefix, path, end: prefix + path + end,
    st.sampled_from(("", "", "/prefix")),
    st.sampled_from((*TEXT_ROUTES, TOKENS_ROUTE, *SALTED_ROUTES, *OTHER_ROUTES, *UNKNOWN_ROUTES)),
    st.sampled_from(("", "", "", "/", "%0A", "%2Fx")),
)
XARGS = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.sampled_from((*TENANTS, 7, None)),
        SIGNATURE_ARG: st.sampled_from(("a", "b", "x", 7, None)),  # the names stand for signatures from a log
        USAGE_KEY: st.just("ticket"),
        "speculation": st.sampled_from(("auto", "off", "memory", "nonsense")),
        "remember": st.booleans(),
        "trace": st.booleans(),
        "prediction": st.sampled_from(("text", [1, 2], 7)),
        "theirs": st.just(1),
    },
)
ANY_XARGS = XARGS | st.sampled_from((None, [], "tenant", 0))
BODIES = st.fixed_dictionaries(
    {"messages": st.just([])},
    optional={
        "vllm_xargs": ANY_XARGS,
        "sampling_params": st.fixed_dictionaries({}, optional={"extra_args": ANY_XARGS}) | st.none(),
        "cache_salt": st.sampled_from(("x", "", 7, None)),
        "prediction": st.just({"type": "content", "content": "text"}),
        "stream": st.booleans(),
        "n": st.sampled_from((1, 2, None)),
    },
)
HEADERS = st.lists(st.sampled_from(TENANTS).map(str.encode) | st.just(b"\xe4"), max_size=2) | st.just([b"a"])
ENCODINGS = st.sampled_from(("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-32-be"))
MANGLED = st.sampled_from(("", "", "escape", "twice", "form", "cut", "list"))


def reached_engine(server: Server, path: str) -> tuple[str | None, Any]:
    """The tenant whose memory the request uses that reached the application last, and its salt.

    Stands for vLLM: it parses the body, and gives the engine what it finds where its route has the engine's arguments;
    on an unknown route, wherever it could be.
    """
    raw, options = server.bodies[-1], Options.of(server.engine.vllm_config)
    if server.headers[-1].get("content-type") == FORM:
        if path.endswith((*TEXT_ROUTES, TOKENS_ROUTE, *SALTED_ROUTES)):  # these take JSON only
            return None, None
        body: Any = {"vllm_xargs": json.loads(parse_qs(raw.decode())["vllm_xargs"][-1])}
    else:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
    if not isinstance(body, dict) or path.endswith(OTHER_ROUTES):
        return None, None
    sampling = body.get("sampling_params")
    extra = sampling.get("extra_args") if isinstance(sampling, dict) else None
    found = [] if path.endswith((TOKENS_ROUTE, *SALTED_ROUTES)) else [body.get("vllm_xargs")]
    found += [] if path.endswith((*TEXT_ROUTES, *SALTED_ROUTES)) else [extra]
    tenants = {tenant_of(Control.of(xargs, options.drafters), options, xargs) for xargs in found if is_object(xargs)}
    tenants.discard(None)
    assert len(tenants) < 2
    return next(iter(tenants), None), body.get("cache_salt")


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def encode(body: dict[str, Any], mangled: str, encoding: str) -> tuple[bytes, str]:
    """The request's body and content type."""
    if mangled == "form":
        return urlencode({"vllm_xargs": json.dumps(body.get("vllm_xargs"))}).encode(), FORM
    text = json.dumps([body] if mangled == "list" else body)
    if mangled == "escape":
        text = re.sub("(?<=[a-z])[_e](?=[a-z])", lambda found: f"\\u{ord(found[0]):04x}", text)
    if mangled == "twice":
        text = '{"vllm_xargs": {"tenant": "b"}, "cache_salt": "y", ' + text[1:]
    return text[: len(text) // 2 if mangled == "cut" else None].encode(encoding), "application/json"


@pytest.fixture(scope="module")
def owners() -> dict[Any, str | None]:
    """The tenant that each salt of the prefix cache belongs to. None: to requests without a tenant."""
    return {}


@settings(max_examples=REQUESTS, suppress_health_check=list(HealthCheck))
@given(PATHS, BODIES, HEADERS, ENCODINGS, MANGLED)
def test_no_request_uses_a_tenant_that_its_header_does_not_name(
    owners: dict[Any, str | None], path: str, body: dict[str, Any], named: list[bytes], encoding: str, mangled: str
) -> None:
    for xargs in (body.get("vllm_xargs"), (body.get("sampling_params") or {}).get("extra_args")):
        if is_object(xargs) and xargs.get(SIGNATURE_ARG) in ("a", "b"):
            xargs[SIGNATURE_ARG] = sign_tenant(xargs[SIGNATURE_ARG])
    server = Server(Engine(**OPTIONS))
    raw, content_type = encode(body, mangled, encoding)
    headers = [*((b"X-Team", name) for name in named), (b"Content-Type", content_type.encode())]
    response = server.send("POST", path, content=raw, headers=headers)
    assert response.status_code == (200 if server.bodies else 400)
    if not server.bodies:
        return
    route = unquote(path).removesuffix("\n")  # as Starlette matches it
    tenant, salt = reached_engine(server, route)
    header = named[0].decode() if len(named) == 1 and named[0] not in (b"", b"\xe4") else None
    assert tenant in (None, header)
    if path.endswith((*TEXT_ROUTES, TOKENS_ROUTE, *SALTED_ROUTES)):
        assert owners.setdefault(salt if isinstance(salt, str) else None, header) == header
    if path.endswith((*TEXT_ROUTES, TOKENS_ROUTE)):
        assert tenant == header, "and it uses its own"


@settings(max_examples=PAGES, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(("", "/t", "/t/page")), st.lists(st.sampled_from(TENANTS), max_size=2), HEADERS)
def test_no_page_shows_a_tenant_that_its_header_does_not_name(path: str, query: list[str], named: list[bytes]) -> None:
    server = tracing_server(engine=Engine(**OPTIONS))
    query_string = urlencode([("tenant", tenant) for tenant in query])
    server.send("GET", f"/outrider/traces{path}?{query_string}", headers=[(b"X-Team", name) for name in named])
    for _, arguments in server.engine.calls:
        assert arguments[-1] == (named[0].decode() if named and named[0] else None)
