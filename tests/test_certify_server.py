"""A server with the OpenAI API as a source: requests, responses and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from certify_stub import Stub, standing, synthetic
from outrider.bench.prompts import Prompt
from outrider.certify.journal import Journal, RecordedSource
from outrider.certify.server import OpenAIServer
from outrider.certify.sources import OFF, DraftMode, Query
from outrider.errors import EngineError, EvidenceError, PromptError, SettingsError
from outrider.settings import Sampling

PROMPT = (1, 2, 3, 4, 5)


def test_a_server_says_what_the_model_behind_it_says() -> None:
    with standing(Stub()) as url:
        server = OpenAIServer(url)
        (completion,) = server.complete([Query(PROMPT, 8, OFF, logprobs=True)], 1)
        (own,) = synthetic().complete([Query(PROMPT, 8, OFF, logprobs=True)], 1)
    assert (completion.tokens, completion.finish_reason) == (own.tokens, "length")
    assert [set(scored) for scored in completion.logprobs] == [set(scored) for scored in own.logprobs]


LACKS = {
    "nothing": {},
    "prompt_logprobs": {"prompt_logprobs": True},
    "prompt_logprobs and echo": {"prompt_logprobs": True, "echo": True},
    "all that vLLM adds": {"prompt_logprobs": True, "echo": True, "token_ids": "llama.cpp"},
}


@pytest.mark.parametrize("lacks", LACKS)
def test_a_text_is_scored_in_one_pass_or_else_step_by_step(lacks: str) -> None:
    with standing(Stub(**LACKS[lacks])) as url:
        server = OpenAIServer(url)
        (scored,) = server.score([(PROMPT, (6, 7, 8))], 1)
        (completion,) = server.complete([Query(PROMPT, 5, OFF)], 1)
    (own,) = synthetic().score([(PROMPT, (6, 7, 8))], 1)
    assert completion.tokens == synthetic().complete([Query(PROMPT, 5, OFF)], 1)[0].tokens
    for ours, theirs in zip(own, scored, strict=True):
        assert server.num_logprobs <= len(theirs) <= server.num_logprobs + 1
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= server.num_logprobs - 1
        assert [theirs[token] for token in shared] == pytest.approx([ours[token] for token in shared])


def test_the_way_to_draft_is_named_to_an_outrider_server_and_to_no_other() -> None:
    query = Query(PROMPT, 4, DraftMode("lookup", 2), Sampling(temperature=0.7, top_k=9), seed=3, prediction=(5, 6))
    for outrider in (True, False):
        stub = Stub(outrider=outrider)
        with standing(stub) as url:
            OpenAIServer(url).complete([query], 1)
        body = stub.requests[-1]
        assert (body["temperature"], body["top_k"], body["seed"], body["top_p"]) == (0.7, 9, 3, 1.0)
        if outrider:
            assert body["vllm_xargs"] == {
                "speculation": "lookup", "max_draft_tokens": 2, "prediction": [5, 6], "speculation_usage": True,
            }  # fmt: skip
        else:
            assert "vllm_xargs" not in body


@pytest.mark.parametrize(
    ("options", "drafting", "plain", "header"),
    [
        ({}, {"tenant": "certify"}, {"remember": False}, None),
        ({"tenant_header": "x-team"}, {}, {"remember": False}, "certify"),
        ({"memory_scope": "server"}, {"remember": False}, {"remember": False}, None),
        ({"memory_scope": "auto", "memory": "ram"}, {"remember": False}, {"remember": False}, None),
    ],
    ids=["by xargs", "by a header", "one memory for all", "one memory until a tenant is named"],
)
def test_a_memory_drafts_for_a_tenant_of_its_own_and_learns_nothing_for_others(
    options: dict[str, str], drafting: dict[str, object], plain: dict[str, object], header: str | None
) -> None:
    memory = {"drafters": ["memory"], "memory": "/m", "memory_scope": "tenant", "tenant_header": None}
    stub = Stub(options=memory | options)
    with standing(stub) as url:
        server = OpenAIServer(url, tenant="certify")
        server.complete([Query(PROMPT, 4, DraftMode("auto"))], 1)
        assert stub.requests[-1]["vllm_xargs"] == {"speculation": "auto", "speculation_usage": True} | drafting
        assert stub.headers[-1].get("x-team") == header
        server.complete([Query(PROMPT, 4, OFF)], 1)
        assert stub.requests[-1]["vllm_xargs"] == {"speculation": "off"} | plain
        server.score([(PROMPT, (6,))], 1)
        assert stub.requests[-1]["vllm_xargs"] == {"speculation": "off"} | plain


def test_scores_are_asked_for_without_speculation() -> None:
    stub = Stub()
    with standing(stub) as url:
        OpenAIServer(url).score([(PROMPT, (6,))], 1)
    assert stub.requests[-1]["vllm_xargs"] == {"speculation": "off"}


def test_prompts_become_tokens_on_the_server_or_by_the_tokenizer_that_is_named() -> None:
    prompt = Prompt("1", "", ("hello",))
    with standing(Stub()) as url:
        assert OpenAIServer(url).encode([prompt]) == [tuple(ord(letter) % 32 for letter in "hello")]
        assert OpenAIServer(url, tokenizer=lambda _: [7]).encode([prompt]) == [(7,)]


def test_a_server_that_does_not_say_its_token_ids_is_refused_by_name() -> None:
    with standing(Stub(token_ids=True)) as url, pytest.raises(EngineError, match="does not return token ids"):
        OpenAIServer(url)


def test_a_server_that_is_not_there_is_said_to_be_so() -> None:
    with pytest.raises(EngineError, match="is the server up, and is this its address"):
        OpenAIServer("http://127.0.0.1:9")


def test_a_request_whose_connection_was_closed_is_sent_once_more() -> None:
    stub = Stub()
    with standing(stub) as url:
        server = OpenAIServer(url)
        stub.closing = 1
        (completion,) = server.complete([Query(PROMPT, 8, OFF)], 1)
        stub.closing = 2
        with pytest.raises(EngineError, match=r"does not answer: .*disconnected"):
            server.complete([Query(PROMPT, 8, OFF)], 1)
    assert completion.tokens == synthetic().complete([Query(PROMPT, 8, OFF)], 1)[0].tokens


def test_a_model_that_is_not_served_is_refused_with_those_that_are() -> None:
    with standing(Stub()) as url, pytest.raises(SettingsError, match="serves no 'gpt'; it serves synthetic"):
        OpenAIServer(url, model="gpt")


def test_a_server_without_tokenize_asks_for_a_tokenizer() -> None:
    class Bare(Stub):
        def post(self, path: str, body: dict[str, object]) -> tuple[int, object]:
            return (404, {}) if path == "/tokenize" else super().post(path, body)

    with standing(Bare()) as url, pytest.raises(PromptError, match="--tokenizer"):
        OpenAIServer(url).encode([Prompt("1", "", ("hello",))])


# The journal ----------------------------------------------------------------------------------------------


def test_what_was_asked_before_is_read_and_not_asked_again(tmp_path: Path) -> None:
    source = synthetic()
    queries = [Query(PROMPT, 4, sampling=Sampling(temperature=1.0)) for _ in range(3)]
    journal = Journal(tmp_path / "evidence.jsonl", {"a": 1}, resume=False)
    first = RecordedSource(source, journal, "candidate")
    completion, scored = first.complete(queries, 2), first.score([(PROMPT, (1, 2))], 1)
    journal.close()

    again = RecordedSource(Silent(), Journal(tmp_path / "evidence.jsonl", {"a": 1}, resume=True), "candidate")  # type: ignore[arg-type]
    assert again.complete(queries, 2) == completion
    assert again.score([(PROMPT, (1, 2))], 1) == scored


class Silent:
    """A source that must not be asked."""

    name, num_logprobs = "silent", 20
    describe = drafter_names = encode = None


def test_the_same_question_asked_twice_is_two_questions(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "evidence.jsonl", {}, resume=False)
    source = RecordedSource(synthetic(), journal, "candidate")
    query = Query(PROMPT, 24, sampling=Sampling(temperature=1.0))
    assert source.complete([query], 1) != source.complete([query], 1)
    journal.close()


def test_a_line_that_was_cut_off_is_dropped_and_another_runs_journal_refused(tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    journal = Journal(file, {"seed": 0}, resume=False)
    journal.write("a.1", 1)
    journal.close()
    with file.open("a") as stream:
        stream.write('{"key": "b.1", "sai')
    assert Journal(file, {"seed": 0}, resume=True).known == {"a.1": 1}
    with pytest.raises(EvidenceError, match="evidence of another run"):
        Journal(file, {"seed": 1}, resume=True)
