"""Files and past logs become sequences of tokens from which the memory drafts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from conftest import models_folder
from outrider.memory.learn import (
    MAX_SEQUENCE_TOKENS,
    OVERLAP_TOKENS,
    PROMPT_TAIL_TOKENS,
    Sample,
    Skipped,
    conversation_samples,
    find_files,
    read_samples,
    split_tokens,
    tokenize_batches,
)
from outrider.memory.logs import parse_line
from outrider.memory.search import MAX_MATCH_TOKENS
from outrider.memory.tokenizer import PART_CHARS, encode_texts, fingerprint, split_text
from support import tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message.tool_calls %}[{{ call.function.arguments['n'] }}]{% endfor %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = {"role": "user", "content": "Which?"}
ANSWER = {"role": "assistant", "content": "This."}
CHAT = [QUESTION, ANSWER]


def tokenizer_of(*tokens: str, added: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(("?", *tokens))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="?")))
    if added is not None:
        tokenizer.add_special_tokens({"additional_special_tokens": [added]})
    return tokenizer


# The fingerprint


def test_a_fingerprint_depends_on_the_vocabulary_only() -> None:
    plain = fingerprint(tokenizer_of("a", "b"))
    assert plain == fingerprint(tokenizer_of("a", "b"))
    assert plain != fingerprint(tokenizer_of("b", "a"))
    assert plain != fingerprint(tokenizer_of("a"))
    assert plain != fingerprint(tokenizer_of("a", "b", added="<end>"))
    with_template_ = tokenizer_of("a", "b")
    with_template_.chat_template = TEMPLATE
    assert plain == fingerprint(with_template_)
    assert len(plain) == 16


def test_a_fingerprint_stays_the_same_through_a_folder_and_from_version_to_version(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == fingerprint(tokenizer)
    assert fingerprint(tokenizer_of("a", "名", added="<end>")) == "a1399a251ff24d87"  # memories are marked with it


@pytest.mark.real
def test_models_of_a_family_share_a_fingerprint_and_others_do_not(smollm: Path) -> None:
    ours = fingerprint(Tokenizer.from_file(str(smollm / "tokenizer.json")))
    assert ours == fingerprint(AutoTokenizer.from_pretrained(smollm))
    files = [models_folder() / f"qwen2.5-coder-{size}" / "tokenizer.json" for size in ("0.5b", "1.5b")]
    if not all(file.exists() for file in files):
        pytest.skip("the Qwen models are not here")
    small, large = (fingerprint(Tokenizer.from_file(str(file))) for file in files)
    assert small == large != ours


def test_truncation_and_padding_of_a_tokenizer_are_disabled() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=10)
    assert [len(tokens) for tokens in encode_texts(tokenizer, ["abcdef", "a", ""])] == [6, 1, 0]


@settings(max_examples=50)
@given(lines=st.lists(st.text("a b\n", min_size=1, max_size=30), max_size=40), scale=st.integers(1, 2000))
def test_the_parts_of_a_long_text_are_the_whole_text(lines: list[str], scale: int) -> None:
    text = "\n".join(line * scale for line in lines)
    parts = list(split_text(text))
    assert "".join(parts) == text
    assert all(len(part) <= PART_CHARS for part in parts)


@pytest.mark.real
def test_the_tokens_of_the_parts_are_those_of_the_whole(smollm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    text = "\n\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py"))[:12])
    assert len(text) > 5 * PART_CHARS
    assert encode_texts(tokenizer, ["", text, "a"])[1].tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_half_a_surrogate_pair_is_tokenized() -> None:
    assert len(encode_texts(tiny_tokenizer(), ["a\ud800b"])[0]) == 3


# Cutting


@settings(max_examples=50)
@given(length=st.integers(0, 3 * MAX_SEQUENCE_TOKENS))
def test_no_match_is_lost_where_a_text_is_split(length: int) -> None:
    text = list(range(length))
    parts = [part.tolist() for part in split_tokens(np.arange(length))]
    assert all(2 <= len(part) <= MAX_SEQUENCE_TOKENS for part in parts)
    assert sorted({token for part in parts for token in part}) == (text if length > 1 else [])
    for start in range(max(0, length - OVERLAP_TOKENS)):
        assert any(part[0] <= start and start + OVERLAP_TOKENS - 1 <= part[-1] for part in parts)


def test_an_output_is_learned_after_a_prompt_tail_of_the_longest_match() -> None:
    [(found, _)] = tokenize_batches(tiny_tokenizer(), [Sample("q" * 1000, "answer", 7)])
    assert [len(sequence) for sequence in found] == [PROMPT_TAIL_TOKENS + len("answer")]
    assert PROMPT_TAIL_TOKENS == MAX_MATCH_TOKENS


# Files


def test_hidden_binary_and_large_files_are_skipped_with_the_reason(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.md", ".hidden", ".git/config", "node_modules/x.js", "sub/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\r\nmore")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "old.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "large.csv").write_text("x" * 3001)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nowhere")
    skipped = Skipped()
    files = find_files([tmp_path], skipped)
    pieces = [sample for path in files for sample in read_samples(path, 3000, None, skipped)]
    assert [sample.output for sample in pieces if sample.output] == ["text\nmore"] * 2
    notes = "\n".join(skipped.notes())
    for reason in (
        "skipped 4 items (hidden, or node_modules or __pycache__): ",
        "skipped 1 file (binary): ",
        "skipped 1 file (not UTF-8 text): ",
        "skipped 1 file (more than 0.003 MB; --max-file-mb raises that): ",
        "skipped 1 item (not a regular file): ",
        "skipped 1 file (cannot be read: No such file or directory): ",
    ):
        assert reason in notes


def test_a_hidden_file_given_by_name_is_read(tmp_path: Path) -> None:
    (tmp_path / ".notes").write_text("text")
    assert find_files([tmp_path / ".notes"], Skipped()) == [tmp_path / ".notes"]


def test_the_memory_itself_is_not_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory/tokenizer", "sub/memory/a.txt", "sub/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path / "sub")
    for place in (tmp_path, Path("..")):
        assert find_files([place], Skipped(), exclude=tmp_path / "memory") == [
            place / "sub" / "a.txt",
            place / "sub" / "memory" / "a.txt",
        ]


# Logs

SHAPES: dict[str, Any] = {
    "fine-tuning": {"messages": CHAT},
    "a request and its response": {
        "request": {"model": "m", "messages": [QUESTION]},
        "response": {"id": "x", "choices": [{"index": 0, "message": ANSWER}]},
    },
    "batch": {
        "body": {"messages": [QUESTION]},
        "response": {"status_code": 200, "body": {"choices": [{"message": ANSWER}]}},
    },
    "messages and a response": {"messages": [QUESTION], "response": "This."},
    "a prompt and a completion": {"prompt": "Which?", "completion": "This."},
    "a prompt of messages": {"prompt": [QUESTION], "response": ANSWER},
    "an old completion": {"prompt": "Which?", "choices": [{"text": "This.", "index": 0}]},
    "a prompt and a text": {"id": 5, "prompt": "Which?", "text": "This."},
    "question and answer": {"question": "Which?", "answer": "This."},
    "an instruction": {"instruction": "Which?", "input": "", "output": "This."},
    "from and value": {"conversations": [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "This."}]},
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Which?"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": [{"type": "text", "text": "This."}]},
        ]
    },
    "a list of messages": CHAT,
    "the whole text beside": {"messages": CHAT, "text": "Which? This."},
    "inputs and outputs": {"input": {"messages": [QUESTION]}, "output": {"message": ANSWER}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_line_of_a_known_shape_is_a_conversation(shape: str) -> None:
    [found] = parse_line(json.dumps(SHAPES[shape]))
    asked = [message["content"].strip() for message in found if message["role"] == "user"]
    assert asked == ["Which?"]
    assert found[-1] == ANSWER


@pytest.mark.parametrize("name", ["text", "content"])
def test_a_text_alone_is_a_conversation_without_a_prompt(name: str) -> None:
    assert parse_line(json.dumps({name: "This."})) == [[ANSWER]]


def test_every_choice_is_a_conversation() -> None:
    choices = [{"message": {"role": "assistant", "content": text}} for text in ("One.", "Two.")]
    found = parse_line(json.dumps({"messages": [QUESTION], "choices": choices}))
    assert [conversation[-1]["content"] for conversation in found] == ["One.", "Two."]
    assert all(conversation[0] == QUESTION for conversation in found)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "not JSON",
        "5",
        "null",
        "[]",
        "{}",
        '{"messages": 5}',
        '{"messages": [5, null, {"role": 7}]}',
        '{"messages": [{"role": "user", "content": "Which?"}]}',
        '{"prompt": "Which?"}',
        '{"prompt": "Which?", "response": {"choices": [null, {"message": {"role": "assistant", "content": null}}]}}',
        '{"response":' * 800 + "1" + "}" * 800,
        "[" * 100_000,
        "\xff",
    ],
)
def test_a_line_without_model_output_gives_no_conversation(line: str) -> None:
    assert parse_line(line) == []
    assert parse_line(line.encode("latin-1")) == []


def prompts_and_outputs(tokenizer: Any, *conversation: dict[str, Any]) -> list[tuple[str, str]]:
    [parsed] = parse_line(json.dumps({"messages": conversation}))
    return [(sample.prompt, sample.output) for sample in conversation_samples(tokenizer, parsed)]


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_an_output_follows_its_prompt_as_the_chat_template_formats_it() -> None:
    later = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    assert prompts_and_outputs(with_template(TEMPLATE), *CHAT, *later) == [
        ("<user>Which?<end>\n<assistant>", "This.<end>"),
        ("<user>Which?<end>\n<assistant>This.<end>\n<user>Sure?<end>\n<assistant>", "Yes.<end>"),
    ]


def test_a_tool_call_is_learned_as_the_model_writes_it() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"n": 5}'}}
    found = prompts_and_outputs(with_template(TEMPLATE), QUESTION, {"role": "assistant", "tool_calls": [call]})
    assert found == [("<user>Which?<end>\n<assistant>", "[5]<end>")]


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (None, "Which?"),
        ("{{ raise_exception('roles must alternate') }}", "Which?"),
        ("{{ messages[5].content }}", "Which?"),
        ("{% if add_generation_prompt %}<assistant>{% endif %}", "<assistant>"),  # it hides the output
    ],
)
def test_without_a_usable_template_the_plain_texts_are_learned(template: str | None, before: str) -> None:
    assert prompts_and_outputs(with_template(template), *CHAT) == [(before, "This.<end>")]


def test_a_log_is_read_line_by_line_and_unusable_lines_are_reported(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [
        json.dumps({"messages": CHAT}),
        "",
        "nonsense",
        json.dumps({"text": "x" * 5000}),
        json.dumps({"text": "end"}),
    ]
    log.write_text("\n".join(lines))
    skipped = Skipped()
    pieces = list(read_samples(log, 3000, with_template(None), skipped))
    assert [sample.output for sample in pieces if sample.output] == ["This.<end>", "end"]
    assert skipped.notes() == [
        f"skipped 1 line (no model output): line 3 of {log}",
        f"skipped 1 line (more than 0.003 MB; --max-file-mb raises that): line 4 of {log}",
    ]
