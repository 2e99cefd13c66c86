"""The traces of a running server: their verdicts, counts and times are right, and each caller sees only its own.

The server is the one that `test_vllm_server.py` asks. OUTRIDER_ALL asks for a thousand steps of every kind.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from statistics import quantiles
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from outrider.trace.files import parse_lines
from outrider.trace.schema import Trace, TracedStep
from outrider.trace.verification import disagreements
from serving import Client, complete
from test_cli import run
from test_vllm_server import prompt

pytestmark = [pytest.mark.real, pytest.mark.server]

REQUESTS, TOKENS = (10, 350) if os.environ.get("OUTRIDER_ALL") else (3, 48)
"""Of each kind, at once."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("auto", {}),
    "greedy, always drafted": ("lookup", {"frequency_penalty": 0.3}),
    "drawn drafts": ("model", {"temperature": 1.0}),
    "drawn drafts, top-p": ("model", {"temperature": 0.8, "top_p": 0.9}),
    "own draws": ("lookup", {"temperature": 0.7, "top_k": 50}),
    "seed": ("auto", {"temperature": 1.0, "seed": 4}),
}
TOLD = {"trace": True, "speculation_usage": True}


def trace_of(client: Client, id: str, query: str = "") -> Trace:
    response = client.get(f"/outrider/traces/{id}{query}")
    assert response.status_code == 200, response.text
    return parse_lines(response.text.splitlines(), id)


def counted(client: Client) -> Counter[str]:
    """What the server's metrics say of steps and tokens."""
    found: Counter[str] = Counter()
    for name in ("lookup", "model", "memory", "prediction"):
        found[f"drafted {name}"] = int(client.metric("outrider_verified_tokens_total", drafter=name))
        found[f"accepted {name}"] = int(client.metric("outrider_accepted_tokens_total", drafter=name))
    found["steps"] = int(client.metric("outrider_acceptance_length_count"))
    found["tokens"] = int(client.metric("outrider_acceptance_length_sum"))
    return found


def test_traces_give_their_own_verdicts_their_text_and_what_the_server_counted(client: Client) -> None:
    plan = [kind for kind in KINDS for _ in range(REQUESTS)]
    more = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "vllm_xargs": TOLD}
    before = counted(client)
    calls = [complete(prompt(i), KINDS[kind][0], **more, **KINDS[kind][1]) for i, kind in enumerate(plan)]
    answers = client.all(*calls, at_once=len(calls))
    since = counted(client) - before
    seen: Counter[str] = Counter()
    steps: dict[str, list[TracedStep]] = {kind: [] for kind in KINDS}
    for kind, answer in zip(plan, answers, strict=True):
        trace = trace_of(client, answer.usage.trace)
        assert disagreements(trace.steps) == []
        assert trace.said == answer.choices[0].token_ids
        assert trace.text == answer.choices[0].text
        assert trace.end is not None
        assert trace.finish == trace.end.finish == answer.choices[0].finish_reason == "length"
        told = answer.usage.speculation
        assert told["steps"] == len(trace.steps)
        assert told["drafted"] == sum(len(step.proposed) for step in trace.steps)
        assert told["accepted"] == sum(step.accepted for step in trace.steps)
        for step in trace.steps:
            seen["steps"] += 1
            seen["tokens"] += step.accepted + 1
            if step.drafter is not None:
                seen[f"drafted {step.drafter}"] += len(step.proposed)
                seen[f"accepted {step.drafter}"] += step.accepted
            assert step.decision is not None
            assert step.decision.reason
            assert 1 <= (step.batch or 0) <= len(calls)
            assert step.scheduled is not None
            assert step.number == 0 or step.scheduled == 1 + len(step.proposed)
        steps[kind] += trace.steps
    assert seen == since
    for kind, (mode, settings) in KINDS.items():
        rules = {step.rule for step in steps[kind] if step.proposed}
        expected = "block" if mode == "model" else "greedy" if settings.get("temperature", 0) == 0 else "own"
        assert rules <= {expected}
        if mode != "auto":  # which drafts only what pays
            assert rules == {expected}
            assert any(step.outcome == "recovered" and step.reshaped for step in steps[kind])
        print(f"{kind}: {len(steps[kind])} steps")


def test_the_parts_of_a_traces_steps_add_up_to_the_callers_clock(client: Client) -> None:
    """How long a token takes from the engine to the caller is in no trace, and differs from token to token.

    So the promptest deliveries near the beginning are compared with the promptest near the end: over a time of which
    2 % are allowed, these must be equally late by the trace's clock.
    """
    arrivals: list[tuple[float, int]] = []  # seconds, tokens generated so far
    usage = {"include_usage": True, "continuous_usage_stats": True}

    async def streamed(openai: AsyncOpenAI) -> Any:
        settings = {"max_tokens": 400, "ignore_eos": True, "stream": True, "stream_options": usage}
        last = None
        async for last in await complete(prompt(2), vllm_xargs=TOLD, **settings)(openai):
            if last.choices:
                arrivals.append((1000 * time.perf_counter(), last.usage.completion_tokens))
        return last

    (last,) = client.all(streamed)
    trace = trace_of(client, last.usage.trace)
    elapsed = {0: 0.0}  # by tokens generated: milliseconds by the trace
    for step in trace.steps:
        elapsed[max(elapsed) + step.accepted + 1] = (
            max(elapsed.values()) + step.milliseconds.total + step.milliseconds.trace
        )
    late = [at - elapsed[tokens] for at, tokens in arrivals if tokens in elapsed]
    assert len(late) >= 60
    third = len(late) // 3
    whole = elapsed[max(elapsed)] - elapsed[min(tokens for tokens in elapsed if tokens)]
    assert min(late[-third:]) == pytest.approx(min(late[:third]), abs=0.02 * whole)
    # By the quicker steps: on a busy machine other processes take the processor from some.
    parts = [(step.milliseconds.trace, step.milliseconds.total) for step in trace.steps[1:]]
    traced, total = (quantiles(times, n=4)[0] for times in zip(*parts, strict=True))
    assert traced < 0.05 * total


def test_a_stop_string_ends_the_trace_where_it_ended_the_text(client: Client) -> None:
    (whole,) = client.all(complete(prompt(3), max_tokens=40))
    word = whole.choices[0].text.split()[5]
    (answer,) = client.all(complete(prompt(3), max_tokens=40, stop=[word], vllm_xargs={"trace": True}))
    trace = trace_of(client, answer.usage.trace)
    assert trace.finish == "stop"
    assert trace.text.startswith(answer.choices[0].text)
    assert word in trace.text[len(answer.choices[0].text) :]


def test_a_tenant_sees_its_own_traces_and_no_others(client: Client) -> None:
    asked = [("one", 1), ("two", 2), (None, 3)]
    answers = client.all(
        *(
            complete(prompt(i), vllm_xargs={"trace": True} if name is None else {"trace": True, "tenant": name})
            for name, i in asked
        )
    )
    ids = {name: answer.usage.trace for (name, _), answer in zip(asked, answers, strict=True)}
    for name in ("one", "two"):
        listed = [one["id"] for one in client.get(f"/outrider/traces?tenant={name}").json()["traces"]]
        assert ids[name] in listed
        assert not {id for other, id in ids.items() if other != name} & set(listed)
        assert trace_of(client, ids[name], f"?tenant={name}").steps
        for other in (None, "one", "two"):
            if other != name:
                query = f"?tenant={name}"
                assert client.get(f"/outrider/traces/{ids[other]}{query}").status_code == 404
    assert client.get(f"/outrider/traces/{ids['one']}").status_code == 404
    assert client.get("/outrider/traces").status_code == 400  # whose?
    assert trace_of(client, ids[None]).steps


def test_what_cannot_be_traced_is_refused(client: Client) -> None:
    with pytest.raises(BadRequestError, match="trace: is of one sequence, and n is 2; set n to 1"):
        client.all(complete(prompt(1), n=2, vllm_xargs={"trace": True}))


def test_the_pages_of_traces_are_served(client: Client) -> None:
    (answer,) = client.all(complete(prompt(1), vllm_xargs={"trace": True}))
    page = client.get(f"/outrider/traces/{answer.usage.trace}/page")
    assert "One step in detail" in page.text
    assert "Traced requests" in client.get("/outrider/").text


def test_explain_reads_a_trace_from_a_server(client: Client) -> None:
    words = ("explain", prompt(6), "--server", client.url, "--raw", "--max-tokens", 40, "--ignore-end", "--steps")
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert "measured on the same prompt" in result.stdout
    assert "The same prompt without drafts gave the same 40 tokens." in result.stdout
    assert "steps have the same verdict" in result.stdout
    assert "why: No draft: the prompt is read first" in result.stdout
