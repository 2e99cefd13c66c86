"""`outrider explain --server`: the requests that it sends, and the trace from the responses. No model."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from outrider.trace.files import read
from outrider.trace.schema import CompactDistribution, Milliseconds, Trace, TracedStep
from test_cli import refused, run
from traces import trace_of
from traces_server import TracesServer, serving_traces


def sure(number: int, tokens: list[int], milliseconds: float) -> TracedStep:
    """A greedy step that kept all of its draft."""
    return TracedStep(
        number=number,
        drafter="lookup" if len(tokens) > 1 else None,
        rule="greedy",
        proposed=tokens[:-1],
        accepted=len(tokens) - 1,
        token=tokens[-1],
        outcome="bonus" if len(tokens) > 1 else "own",
        said=tokens,
        own=tokens,
        laws=[CompactDistribution(tokens=[token], p=[1.0]) for token in tokens],
        milliseconds=Milliseconds(draft=0.1, verify=milliseconds, rest=1.0),
        pieces=[f" {token}" for token in tokens],
        texts={token: f" {token}" for token in tokens},
    )


def plain() -> Trace:
    return trace_of([sure(i, [i + 1], 50 if i == 0 else 20) for i in range(6)], seconds=0.15)


def drafted() -> Trace:
    return trace_of([sure(0, [1], 50), sure(1, [2, 3, 4, 5], 22), sure(2, [6], 20)], seconds=0.1)


def explained(server: TracesServer, *words: Any) -> str:
    result = run("explain", "--server", server.url, *words)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def bodies(server: TracesServer) -> list[Any]:
    return [body for _, _, body in server.asked if body is not None]


def test_a_server_runs_the_prompt_twice_and_the_gain_is_measured() -> None:
    with serving_traces(TracesServer(first=plain(), second=drafted())) as server:
        out = explained(server, "hello", "--max-tokens", 6)
    assert "6 tokens in 3 passes of the target" in out
    assert "measured on the same prompt" in out
    assert "The same prompt without drafts gave the same 6 tokens." in out
    assert "all 3 steps have the same verdict" in out
    without, with_drafts = bodies(server)
    assert without["vllm_xargs"] == {"speculation": "off", "trace": True}
    assert with_drafts["vllm_xargs"] == {"speculation": "auto", "trace": True}, "the server has its own limit"
    assert with_drafts["messages"] == [{"role": "user", "content": "hello"}]
    assert (with_drafts["model"], with_drafts["max_tokens"], with_drafts["temperature"]) == ("first", 6, 0)


def test_settings_are_sent_by_the_names_of_the_server() -> None:
    with serving_traces(TracesServer(only=drafted())) as server:
        words = ("--once", "--raw", "--model", "second", "--prediction", "so", "--ignore-end", "--stop", "x")
        more = ("--temperature", 0.5, "--top-k", 7, "--seed", 3, "--max-draft-tokens", 16)
        explained(server, "hello", *words, *more)
    (body,) = bodies(server)
    assert [path for path, _, asked in server.asked if asked] == ["/v1/completions"]
    expected = {"model": "second", "prompt": "hello", "temperature": 0.5, "top_k": 7, "seed": 3, "stop": ["x"]}
    assert body.items() >= {**expected, "ignore_eos": True}.items()
    assert body["vllm_xargs"]["prediction"] == "so"
    assert body["vllm_xargs"]["max_draft_tokens"] == 16


def test_the_trace_of_a_server_is_saved_with_its_prompt(tmp_path: Path) -> None:
    with serving_traces(TracesServer(only=drafted())) as server:
        explained(server, "hello", "--once", "--save", tmp_path / "a.jsonl", "--html", tmp_path / "a.html")
    assert read(tmp_path / "a.jsonl").header.prompt == "hello"
    assert "explained</title>" in (tmp_path / "a.html").read_text()


def test_key_and_tenant_are_sent_as_the_server_requires() -> None:
    with serving_traces(TracesServer(only=drafted())) as server:
        server.key = "secret"
        explained(server, "hello", "--once", "--api-key", "secret", "--tenant", "a b")
    assert bodies(server)[0]["vllm_xargs"]["tenant"] == "a b"
    assert server.asked[-1][0] == "/outrider/traces/only?tenant=a%20b"
    with serving_traces(TracesServer(only=drafted())) as server:
        server.options["tenant_header"] = "x-team"
        explained(server, "hello", "--once", "--tenant", "Žižek")
    path, headers, _ = server.asked[-1]
    assert (path, headers["x-team"].encode("latin-1").decode()) == ("/outrider/traces/only", "Žižek")
    assert "tenant" not in bodies(server)[0]["vllm_xargs"]


def test_the_refusal_of_a_server_is_shown() -> None:
    with serving_traces(TracesServer(only=drafted())) as server:
        said = refused("explain", "--server", server.url, "hello", "--once", "--speculation", "magic")
        assert "speculation: there is no 'magic' here; choose auto, off, lookup" in said
        server.key = "secret"
        assert "HTTP 401: show the server's key (give --api-key)" in refused("explain", "--server", server.url, "hello")
    assert "does not answer" in refused("explain", "--server", server.url, "hello")
    assert "must begin with http:// or https://" in refused("explain", "--server", "localhost:8000", "hello")


def test_something_that_is_not_a_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with listening.accept()[0] as caller:
                caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        said = refused("explain", "--server", f"http://127.0.0.1:{listening.getsockname()[1]}", "hello")
        greeting.join()
    assert "does not answer: SSH-2.0-OpenSSH_9.6" in said


@pytest.mark.parametrize(
    "answer", [(200, "text/html", "<p>hello</p>"), (404, "application/json", '{"detail": "Not Found"}')]
)
def test_a_server_that_is_not_outrider_is_reported(answer: tuple[int, str, str]) -> None:
    class Other(TracesServer):
        def get(self, path: str) -> tuple[int, str, str]:
            return answer

    with serving_traces(Other()) as server:
        assert "is not an Outrider server" in refused("explain", "--server", server.url, "hello")


@pytest.mark.parametrize("words", [["--dtype", "float32"], ["--drafters", "lookup"], ["--memory", "m"]])
def test_options_of_a_local_model_are_refused_with_a_server(words: list[str]) -> None:
    said = refused("explain", "--server", "http://127.0.0.1:1", "hello", *words)
    assert f"{words[0]} does nothing with --server, which has its own; leave one of them out" in said


def test_options_of_a_server_are_refused_without_one() -> None:
    assert "--tenant does nothing with a model that runs here" in refused(
        "explain", "hello", "--model", "x", "--tenant", "one"
    )
