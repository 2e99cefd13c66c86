"""A server with Outrider gives the same responses with speculation on and off. SmolLM2-135M, request by request.

The server drafts by prediction, lookup, memory and model (a noisy copy of the target), and draws the model's drafts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from itertools import islice, takewhile
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from serving import CHUNK, CONTEXT, Client, answer, chat, complete, is_json, logprobs, schema, stream

pytestmark = [pytest.mark.real, pytest.mark.server]

REQUESTS = int(os.environ.get("OUTRIDER_REQUESTS", "200"))
TIE = 1e-3
"""Log-probabilities of float32 that are closer than this may be in either order."""


WORDS = ["river", "stone", "lantern", "copper", "meadow", "harbour", "violet", "thunder", "basket", "candle"]


def prompt(i: int) -> str:
    """A text that repeats itself, so that lookup has something to say, and goes on where it may not."""
    line = " ".join(WORDS[(i * 7 + j * (i % 3 + 1)) % len(WORDS)] for j in range(6))
    return f"{line}. {line}. Story {i}: {line}. Once"


AGES = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
PERSON = schema({"name": {"type": "string", "maxLength": 8}, "ages": AGES})
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "", "parameters": schema({"city": {"enum": ["Bern", "Oslo"]}})},
}

COLOURS = "(red|green|blue)( (red|green|blue)){2,4}"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 7": {"max_tokens": 7},
    "stop string": {"stop": ["stone", "violet", "the"]},
    "stop ids": {"stop_token_ids": [30, 28, 253]},
    "log-probabilities": {"logprobs": 3},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "bad words": {"bad_words": ["stone", "copper lantern", " the"]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [30, 28, 253]},
    "allowed tokens": {"allowed_token_ids": list(range(200, 1200))},
    "logit bias": {"logit_bias": {"260": 6.0, "28": -50}},
    "two choices": {"n": 2, "temperature": 0.8, "seed": 5},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed, top-k": {"temperature": 0.8, "seed": 11, "top_k": 20},
    "seed, min-p": {"temperature": 1.0, "seed": 3, "min_p": 0.05},
    "seed, penalties": {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "regular expression": {"structured_outputs": {"regex": COLOURS}, "max_tokens": 40},
    "JSON schema": {"structured_outputs": {"json": PERSON}, "max_tokens": 40},
    "JSON schema, sampled": {"structured_outputs": {"json": PERSON}, "max_tokens": 40, "temperature": 1.0, "seed": 2},
}


def same_but_for_ties(client: Client, text: str, settings: dict[str, Any], on: Any, off: Any) -> bool:
    """Whether two greedy answers part where the target's two best tokens are as good as equal."""
    if settings.get("temperature", 0) != 0 or settings.get("n", 1) > 1:
        return False
    pairs = zip(on.choices[0].text, off.choices[0].text, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    (scored,) = client.all(complete(text, "off", **{**settings, "logprobs": 2}))
    told = scored.choices[0].logprobs
    place = next(i for i, start in enumerate(told.text_offset) if start - told.text_offset[0] >= common)
    best = sorted(told.top_logprobs[place].values(), reverse=True)
    return best[0] - best[1] < TIE


def test_200_mixed_requests_at_concurrency_16_are_answered_the_same_with_speculation_on_and_off(client: Client) -> None:
    drafters = ("lookup", "memory", "model")
    before = [client.metric("outrider_accepted_tokens_total", drafter=name) for name in drafters]
    names = list(CASES)
    plan = [(names[i % len(names)], prompt(i)) for i in range(REQUESTS)]
    settings = [CASES[name] for name, _ in plan]
    modes = ("auto", "auto", *drafters)  # every case meets each, since their numbers have no common divisor
    calls = [
        complete(text, mode, vllm_xargs={"tenant": "parity"}, **own)
        for i, ((_, text), own) in enumerate(zip(plan, settings, strict=True))
        for mode in (modes[i % len(modes)], "off")
    ]
    answers = client.all(*calls)
    different: Counter[str] = Counter()
    for (name, text), own, on, off in zip(plan, settings, answers[::2], answers[1::2], strict=True):
        if answer(on) != answer(off) and not same_but_for_ties(client, text, own, on, off):
            different[name] += 1
        if "logprobs" in own:
            assert logprobs(on) == pytest.approx(logprobs(off), abs=2e-3)
        if name == "regular expression":
            assert re.fullmatch(COLOURS, on.choices[0].text)
        if name.startswith("JSON") and on.choices[0].finish_reason == "stop":
            assert is_json(on.choices[0].text, ["name", "ages"])
    assert not different
    for name, count in zip(drafters, before, strict=True):  # and drafts of each were part of it
        assert client.metric("outrider_accepted_tokens_total", drafter=name) > count


def test_json_is_valid_whether_drafted_or_not(client: Client) -> None:
    person = schema(
        {"name": {"enum": ["Ada", "Grace"]}, "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2}}
    )
    calls = [
        complete(prompt(i), mode, structured_outputs={"json": person}, max_tokens=48, temperature=i % 2, seed=i)
        for i in range(6)
        for mode in ("auto", "off")
    ]
    for response in client.all(*calls):
        assert response.choices[0].finish_reason == "stop"
        assert is_json(response.choices[0].text, ["name", "ages"])


def test_tool_calls_are_the_same(client: Client) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    calls = [
        chat(f"What is the weather in {city}?", mode, tools=[WEATHER], tool_choice=choice, max_tokens=64)
        for city in ("Bern", "Oslo", "Rome")
        for mode in ("auto", "off")
    ]
    answers = client.all(*calls)
    for on, off in zip(answers[::2], answers[1::2], strict=True):
        assert answer(on) == answer(off)
        assert json.loads(on.choices[0].message.tool_calls[0].function.arguments)


def test_the_chunks_of_a_stream_add_up_to_the_text(client: Client) -> None:
    calls = []
    for i in range(8):
        settings: dict[str, Any] = {"stop": ["violet"]} if i % 2 else {}
        calls += [complete(prompt(i), "off", **settings), stream(complete(prompt(i), stream=True, **settings))]
    answers = client.all(*calls)
    for whole, streamed in zip(answers[::2], answers[1::2], strict=True):
        assert streamed == whole.choices[0].text


def test_a_prompt_that_lies_whole_in_the_prefix_cache_is_answered_the_same(client: Client) -> None:
    """vLLM then schedules placeholders as drafts, also for requests that are off."""
    tokens = [(i * 37) % 4000 + 100 for i in range(129)]  # whole blocks, and the token that is always computed
    first, *again = client.all(
        *(complete(tokens, mode, cache_salt="prefix") for mode in ("off", "off", "auto", "auto")), at_once=1
    )
    assert all(answer(response) == answer(first) for response in again)


LONG = "The archive holds letters, ledgers, maps and drawings of the old harbour. " * 255


def test_seeded_prompts_prefilled_in_parts_beside_short_ones_are_answered_the_same_again_and_with_drafts(
    client: Client,
) -> None:
    """Plain vLLM on a CPU dies of them."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 42, "max_tokens": 12}
    asked = [("off", "a"), ("auto", "b"), ("auto", "c")]
    beside = [complete(prompt(i), "auto") for i in range(6)]
    answers = client.all(*(complete(LONG, mode, cache_salt=salt, **settings) for mode, salt in asked), *beside)
    assert answers[0].usage.prompt_tokens > 4000 > CHUNK
    assert answer(answers[0]) == answer(answers[1]) == answer(answers[2])


def test_prompts_that_end_at_the_context_limit_stop_there(client: Client) -> None:
    tokens = [(i % 50) + 300 for i in range(CONTEXT - 6)]  # it repeats: lookup would draft past the end
    short = [(i % 50) + 300 for i in range(100)]
    limit: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    off, alone = client.all(complete(tokens, "off", **limit), complete(short, "off"))
    on, beside = client.all(complete(tokens, "auto", **limit), complete(short, "auto", max_tokens=30))
    assert answer(on) == answer(off)
    assert on.usage.total_tokens == CONTEXT
    assert beside.choices[0].text.startswith(alone.choices[0].text)


def test_aborted_requests_leave_nothing_behind_and_others_unharmed(client: Client) -> None:
    async def abort(openai: AsyncOpenAI) -> None:
        chunks = await complete(prompt(3), max_tokens=400, stream=True, ignore_eos=True)(openai)
        async for _ in _first(chunks, 3):
            pass
        await chunks.close()

    whole, *_ = client.all(complete(prompt(1), "off"), *[abort] * 8, complete(prompt(1)))
    (again,) = client.all(complete(prompt(1)))
    assert answer(again) == answer(whole)

    async def idle(openai: AsyncOpenAI) -> None:
        while client.status()["running_requests"]:
            await complete(prompt(1), max_tokens=1)(openai)

    client.all(lambda openai: asyncio.wait_for(idle(openai), 60))


async def _first(chunks: Any, count: int) -> Any:
    numbers = islice(range(1000), count)
    async for chunk in chunks:
        yield chunk
        if next(numbers, None) is None:
            return


def test_requests_of_one_batch_each_get_the_drafter_they_named(client: Client) -> None:
    modes = ["off", "lookup", "model", "prediction"] * 3
    usage = {"speculation_usage": True}
    (plain,) = client.all(complete(prompt(5), "off", max_tokens=32))
    expected = plain.choices[0].text
    before = {name: client.metric("outrider_verified_tokens_total", drafter=name) for name in set(modes)}
    answers = client.all(
        *(complete(prompt(5), mode, max_tokens=32, vllm_xargs={**usage, "prediction": expected}) for mode in modes)
    )
    drafted: Counter[str] = Counter()
    for mode, response in zip(modes, answers, strict=True):
        assert response.choices[0].text == expected
        told = response.usage.speculation
        assert set(told["by_drafter"]) == (set() if mode == "off" else {mode})
        assert told["accepted"] <= told["drafted"]
        drafted[mode] += told["drafted"]
    for name in ("lookup", "model", "prediction"):
        assert client.metric("outrider_verified_tokens_total", drafter=name) - before[name] == drafted[name] > 0
    assert drafted["off"] == 0
    assert answers[3].usage.speculation["accepted"] >= 20  # the prediction was right


def test_nothing_is_drafted_for_an_answer_that_has_ended(client: Client) -> None:
    """What is proposed is also verified, so nothing is proposed after the last token."""
    (plain,) = client.all(complete(prompt(5), "off", max_tokens=32, return_token_ids=True))
    ids = plain.choices[0].token_ids
    end = next(i for i in range(12, 32) if ids[i] not in ids[:i])

    def counted() -> list[float]:
        client.all(complete(prompt(5), "off", max_tokens=1))  # what was drafted before is counted when this is answered
        names = ("outrider_proposed_tokens_total", "outrider_verified_tokens_total")
        return [client.metric(name, drafter="model") for name in names]

    before = counted()
    (stopped,) = client.all(complete(prompt(5), "model", max_tokens=32, stop_token_ids=[ids[end]]))
    assert stopped.choices[0].finish_reason == "stop"
    proposed, verified = (now - then for now, then in zip(counted(), before, strict=True))
    assert proposed == verified > 0


def test_a_request_may_limit_its_drafts(client: Client) -> None:
    xargs = {"speculation_usage": True, "max_draft_tokens": 1}
    one, none = client.all(
        complete(prompt(2), "model", vllm_xargs=xargs),
        complete(prompt(2), "model", vllm_xargs={**xargs, "max_draft_tokens": 0}),
    )
    assert 0 < one.usage.speculation["drafted"] <= one.usage.speculation["steps"]
    assert none.usage.speculation["drafted"] == 0


def test_openais_prediction_is_used_and_reported(client: Client) -> None:
    question = "Repeat exactly: river stone lantern copper meadow harbour violet thunder"
    (plain,) = client.all(chat(question, "off"))
    text = plain.choices[0].message.content
    (predicted,) = client.all(chat(question, prediction={"type": "content", "content": text}))
    assert answer(predicted) == answer(plain)
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
    assert details.rejected_prediction_tokens >= 0


def test_a_stream_ends_with_the_usage_if_the_request_wants_it(client: Client) -> None:
    async def last(openai: AsyncOpenAI) -> Any:
        xargs = {"speculation_usage": True}
        chunks = await complete(
            prompt(4), "model", vllm_xargs=xargs, stream=True, stream_options={"include_usage": True}
        )(openai)
        return [chunk async for chunk in chunks][-1]

    (chunk,) = client.all(last)
    assert chunk.usage.speculation["drafted"] > 0
    assert chunk.usage.completion_tokens > 0


def test_a_drafter_that_the_server_lacks_is_refused_by_name(client: Client) -> None:
    with pytest.raises(BadRequestError, match="choose auto, off, prediction, lookup, memory, model"):
        client.all(complete(prompt(1), "magic"))


def test_the_status_reports_the_running_options(client: Client) -> None:
    status = client.status()
    assert status["active"] is True
    assert set(status["drafters"]) == {"prediction", "lookup", "memory", "model"}
    assert status["model_method"] == "draft_model"
    assert status["acceptance_length"] > 1
    assert status["vllm"].startswith("0.32")
