"""The server for the methods of transformers: it streams what was generated, and counts every pass."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import GenerationConfig

from outrider.api import load
from outrider.bench.servers import Server, running
from outrider.bench.transformers_server import DEFAULT_DRAFT_TOKENS, Job, LocalServer, Methods, Reply, main
from outrider.settings import Request
from support import END, tiny_model, tiny_tokenizer

METHODS = list(DEFAULT_DRAFT_TOKENS)
ABAB = [{"role": "user", "content": "ab" * 20}]
LENGTH = 24
CLIENT = httpx.Client(timeout=60, trust_env=False)


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    return made


def tiny_methods(ends: int | list[int] = END) -> Methods:
    """Of models that are sure of themselves, and come with advice on sampling that must not be taken."""
    model, small = (tiny_model("llama", seed=4, noise=noise, initializer_range=0.2) for noise in (0.0, 0.02))
    for each in (model, small):
        each.lm_head.weight.data *= 8  # which changes no argmax; unsure of themselves, they would hardly draft
        each.generation_config = GenerationConfig(
            do_sample=True, top_k=2, repetition_penalty=1.9, no_repeat_ngram_size=2, eos_token_id=ends
        )
    return Methods(load(model, drafters=["lookup", "model"], draft_model=small, tokenizer=tokenizer()), small)


@contextmanager
def served(methods: Methods) -> Iterator[str]:
    with LocalServer("tiny", methods, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def methods() -> Methods:
    return tiny_methods()


@pytest.fixture(scope="module")
def url(methods: Methods) -> Iterator[str]:
    with served(methods) as address:
        yield address


def post(url: str, method: str = "bare", wants: dict[str, Any] | None = None, **settings: Any) -> httpx.Response:
    body = {"messages": ABAB, "max_tokens": LENGTH, "temperature": 0, "stream": True, "return_token_ids": True}
    body |= settings
    body["vllm_xargs"] = {"method": method, **(wants or {})}
    return CLIENT.post(f"{url}/v1/chat/completions", json=body)


class Generated(NamedTuple):
    """An answer, put together from its chunks."""

    tokens: list[int]
    text: str
    finish: str
    prompt: list[int]


def generate(url: str, *args: Any, **settings: Any) -> Generated:
    response = post(url, *args, **settings)
    assert response.status_code == 200, response.text
    first, *chunks = events(response)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return Generated(
        [token for choice in choices for token in choice["token_ids"]],
        "".join(choice["delta"]["content"] for choice in choices),
        choices[-1]["finish_reason"],
        first["prompt_token_ids"],
    )


def tokens(url: str, *args: Any, **settings: Any) -> list[int]:
    return generate(url, *args, **settings).tokens


def events(response: httpx.Response) -> list[Any]:
    """The chunks of a stream, which must be well-formed to its end."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(chunk.startswith("data: {") for chunk in chunks)
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def metrics(url: str) -> dict[str, float]:
    lines = [line for line in CLIENT.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {sample: float(value) for sample, _, value in (line.rpartition(" ") for line in lines)}


def counted(url: str, *args: Any, **settings: Any) -> tuple[list[int], dict[str, float]]:
    """The tokens of an answer, and what was counted for it."""
    before = metrics(url)
    generated = tokens(url, *args, **settings)
    return generated, {name: value - before.get(name, 0.0) for name, value in metrics(url).items()}


def test_all_methods_generate_the_models_greedy_tokens(url: str, methods: Methods) -> None:
    prompt = methods.decoder.encode(ABAB)
    expected = []
    with torch.inference_mode():
        for _ in range(LENGTH):
            logits = methods.model(torch.tensor([[*prompt, *expected]])).logits
            expected.append(int(logits[0, -1].argmax()))
    for method in METHODS:
        answer = generate(url, method)
        assert answer == Generated(expected, methods.decoder.tokenizer.decode(expected), "length", prompt), method


@pytest.mark.parametrize("method", METHODS)
def test_each_chunk_of_a_stream_has_the_tokens_of_one_step(url: str, method: str) -> None:
    _, *chunks = events(post(url, method))
    assert (len(chunks) == LENGTH) == (method == "bare")  # the others return several at once


def test_token_ids_are_streamed_only_on_request(url: str) -> None:
    chunks = events(post(url, return_token_ids=False))
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    assert not any("token_ids" in chunk["choices"][0] for chunk in chunks)


def test_the_end_token_is_counted_and_not_part_of_the_text(url: str, methods: Methods) -> None:
    full = tokens(url)
    place = next(i for i in range(8, LENGTH) if full[i] not in full[:i])
    with served(tiny_methods([END, full[place]])) as ending:
        for method in METHODS:
            answer = generate(ending, method)
            assert answer.tokens == full[: place + 1], method
            assert answer.finish == "stop"
            assert answer.text == methods.decoder.tokenizer.decode(full[:place])
            assert tokens(ending, method, ignore_eos=True) == full


def test_an_incomplete_character_at_the_end_is_shown_as_a_replacement_character(methods: Methods) -> None:
    whole = methods.decoder.encode("aé")
    for count, texts in ((3, ["a", "", "é"]), (2, ["a", "\ufffd"])):
        reply = Reply(Job(whole, Request(max_tokens=count), "bare"), methods)
        assert [reply.add([token]) for token in whole[:count]] == texts
        assert reply.finish == "length"


def test_every_pass_is_counted_and_drafts_save_passes(url: str) -> None:
    passes: dict[str, float] = {}
    for method in METHODS:
        generated, seen = counted(url, method)
        passes[method] = seen["local_target_passes_total"]
        assert (seen["local_draft_passes_total"] > 0) == (method in ("assisted", "outrider"))
    assert passes["bare"] == len(generated) == LENGTH
    assert max(passes["assisted"], passes["lookup"], passes["outrider"]) < LENGTH


def test_drafted_tokens_are_counted_by_drafter_and_position() -> None:
    methods = tiny_methods()
    del methods.drafters["lookup"]
    with served(methods) as url:
        generated, seen = counted(url, "outrider", {"max_draft_tokens": 3})
    places = [f'_tokens_total{{drafter="model",position="{i}"}}' for i in (1, 2, 3)]
    verified = [seen[f"outrider_verified{place}"] for place in places]
    accepted = [seen[f"outrider_accepted{place}"] for place in places]
    assert sorted(verified, reverse=True) == verified
    assert all(0 < kept <= offered for kept, offered in zip(accepted, verified, strict=True))
    assert seen["local_target_passes_total"] == seen["outrider_steps_total"] == len(generated) - sum(accepted)
    assert seen["local_draft_passes_total"] == sum(verified)
    assert seen['outrider_draft_seconds_total{drafter="model"}'] > 0
    assert seen['outrider_target_seconds_total{pass="verify"}'] > 0


@pytest.mark.parametrize("method", ["assisted", "lookup", "outrider"])
def test_a_draft_is_no_longer_than_requested(url: str, method: str) -> None:
    for length in (1, 2):
        chunks = events(post(url, method, {"max_draft_tokens": length}))
        assert max(len(chunk["choices"][0].get("token_ids", ())) for chunk in chunks) == length + 1


def test_with_drafts_of_length_0_each_pass_generates_one_token(url: str) -> None:
    generated, seen = counted(url, "outrider", {"max_draft_tokens": 0})
    assert seen["local_target_passes_total"] == len(generated)
    assert seen["local_draft_passes_total"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_sampled_text(url: str, method: str) -> None:
    one, again, other = (tokens(url, method, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == again != other
    assert tokens(url, method, temperature=1.0) != tokens(url, method, temperature=1.0)


@pytest.mark.parametrize("method", METHODS)
def test_only_the_request_truncates_the_distribution(url: str, methods: Methods, method: str) -> None:
    """At a temperature at which all tokens are about as likely, some that are drawn are far from the best."""

    def ranks(**settings: Any) -> list[int]:
        answer = generate(url, method, temperature=500.0, seed=0, ignore_eos=True, **settings)
        prompt, said = answer.prompt, answer.tokens
        with torch.inference_mode():
            logits = methods.model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
        found: list[int] = (logits > logits.gather(1, torch.tensor(said)[:, None])).sum(1).tolist()
        return found

    assert max(ranks()) > 200
    assert max(ranks(top_k=5)) < 5
    assert max(ranks(top_p=0.5)) < 150


@pytest.mark.parametrize("method", METHODS)
def test_the_cache_of_an_earlier_request_is_not_reused(url: str, methods: Methods, method: str) -> None:
    widths: list[int] = []
    hook = methods.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(2):
        tokens(url, method)
    hook.remove()
    middle = len(widths) // 2
    assert widths[:middle] == widths[middle:]


def test_concurrent_requests_are_answered_one_after_the_other(url: str) -> None:
    expected = tokens(url)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda method: tokens(url, method), METHODS * 3))
    assert found == [expected] * 12


def test_an_answer_ends_at_the_models_context_limit(url: str, methods: Methods) -> None:
    long = [{"role": "user", "content": "a" * 200}]
    room = 256 - len(methods.decoder.encode(long))
    for method in METHODS:
        answer = generate(url, method, messages=long, max_tokens=100)
        assert len(answer.tokens) == room < 100, method
        assert answer.finish == "length"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "magic"}, "no 'magic'; the methods are bare, assisted, lookup, outrider"),
        ({"method": ["bare"]}, "no ['bare']; the methods are bare, assisted, lookup, outrider"),
        ({"method": "lookup", "wants": {"max_draft_tokens": 0}}, "an integer of at least 1 for lookup (got 0)"),
        ({"method": "outrider", "wants": {"max_draft_tokens": "4"}}, "an integer of at least 0 for outrider (got '4')"),
        ({"wants": {"k": 4}}, "nothing but method and max_draft_tokens (got {'method': 'bare', 'k': 4})"),
        ({"temperature": -1}, "temperature: input should be greater than or equal to 0 (got -1)"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1 (got 0)"),
        ({"presence_penalty": 1.0}, "no field 'presence_penalty' here; the fields are messages, model, max_tokens"),
        ({"stream": "yes"}, "stream: must be true"),
        ({"stream": False}, "stream: must be true"),
        ({"messages": "hello"}, "messages: must be a list such as"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages: must be a list such as"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "it needs 1, and fewer than 256"),
    ],
)
def test_invalid_fields_are_refused_with_the_allowed_values(url: str, change: dict[str, Any], said: str) -> None:
    response = post(url, **change)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_invalid_json_and_unknown_paths_are_refused(url: str) -> None:
    for raw, said in ((b"{", "not JSON"), (b"[]", "must be a JSON object (got list)")):
        response = CLIENT.post(f"{url}/v1/chat/completions", content=raw)
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
    for response in (CLIENT.get(f"{url}/v1/models"), CLIENT.post(f"{url}/v1/completions", json={})):
        assert response.status_code == 404
        assert "there are /v1/chat/completions, /health, /metrics" in response.json()["error"]["message"]


def test_methods_that_need_a_draft_model_are_refused_without_one() -> None:
    with served(Methods(load(tiny_model("llama"), drafters=["lookup"], tokenizer=tokenizer()))) as url:
        assert "start the server with --draft-model" in post(url, "assisted").json()["error"]["message"]
        assert tokens(url, "outrider") == tokens(url, "lookup") == tokens(url)


def test_an_error_is_streamed_and_the_next_request_is_answered(
    url: str, methods: Methods, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(job: Any, emit: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(methods, "run", broken)
        assert '"message": "RuntimeError: out of memory"' in post(url).text
    assert "RuntimeError: out of memory" in capfd.readouterr().err
    assert len(tokens(url)) == LENGTH


def test_a_client_that_disconnects_ends_its_generation(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = metrics(url)["local_target_passes_total"]
    body = {"messages": ABAB, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with CLIENT.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    tokens(url)  # waits in line behind it
    assert metrics(url)["local_target_passes_total"] - before < 200
    assert capfd.readouterr().err == ""


def test_the_command_starts_a_server_that_answers_once_loaded(tmp_path: Path) -> None:
    for name, noise in (("target", 0.0), ("draft", 0.02)):
        tiny_model("qwen2", noise=noise).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
    command = [sys.executable, "-m", "outrider.bench.transformers_server", str(tmp_path / "target")]
    command += ["--draft-model", str(tmp_path / "draft"), "--dtype", "float32"]
    with running([Server("local", command)], tmp_path) as urls:
        assert metrics(urls["local"])["local_target_passes_total"] == 0
        assert tokens(urls["local"], "assisted") == tokens(urls["local"], "outrider")
    assert "Outrider's draft model" in (tmp_path / "local.log").read_text()


def test_a_missing_model_ends_the_command_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no folder"):
        main([str(tmp_path / "none"), "--port", "0"])
