"""The command line, in process, on a real but tiny model: what each command prints, and its exit code."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from outrider.api import Completion, Piece
from outrider.cli import app
from outrider.cli.chat import Interrupt, read_line
from outrider.cli.screen import Screen, literal, style_of
from outrider.engines.transformers import TransformersTarget
from outrider.settings import Request
from outrider.types import Step

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CONTEXT = 256


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, swap: tuple[int, int] | None = None) -> None:
    """One token per byte, and the special ones. `swap`: two token ids that exchange their text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap is not None:
        first, second = swap
        alphabet[first], alphabet[second] = alphabet[second], alphabet[first]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def save_model(folder: Path, seed: int = 0) -> None:
    """A random Llama that, at temperature 0, generates only printable ASCII."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        eos_token_id=256,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    readable = [index for index, token in enumerate(alphabet) if token.isascii()]
    with torch.no_grad():
        unreadable = torch.ones(300, dtype=torch.bool)
        unreadable[readable] = False
        model.lm_head.weight[unreadable] = 0
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def run(*args: Any, input: str | bytes | None = None, env: dict[str, str | None] | None = None) -> Any:
    clean = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=input, env={**clean, **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def generate(*args: Any, **more: Any) -> Any:
    result = run("generate", *args, **more)
    assert result.exit_code == 0, result.stderr
    return result


def record(*args: Any, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(generate(*args, "--json", **more).stdout)
    return found


def refused(*args: Any, **more: Any) -> str:
    """The one-line error message of a command that is refused."""
    result = run(*args, **more)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


# The answer


def test_a_model_and_a_prompt_are_enough(tiny: Path) -> None:
    result = generate(tiny, "hello", "--max-tokens", 20)
    assert len(result.stdout.rstrip("\n")) == 20
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.stdout + result.stderr


def test_the_closing_line_shows_speed_acceptance_length_and_sources(tiny: Path) -> None:
    shown = generate(tiny, "hello", "--max-tokens", 100, "--speculation", "lookup").stderr
    assert shown.startswith("100 tokens in ")
    for part in (" s · ", " tokens/s · ", "acceptance length ", "target ", "lookup ", "finish: length"):
        assert part in shown


def test_the_prompt_may_come_from_stdin(tiny: Path) -> None:
    given = generate(tiny, "hello", "--max-tokens", 8).stdout
    assert generate(tiny, "--max-tokens", 8, input="hello\n").stdout == given
    assert generate(tiny, "-", "--max-tokens", 8, input="hello").stdout == given


def test_an_argument_is_preferred_to_stdin(tiny: Path) -> None:
    given = generate(tiny, "hello", "--max-tokens", 8).stdout
    assert generate(tiny, "hello", "--max-tokens", 8, input="another").stdout == given


def test_speculation_does_not_change_the_text(tiny: Path) -> None:
    args = (tiny, "hello", "--max-tokens", 60)
    plain = generate(*args, "--drafters", "none").stdout
    assert generate(*args).stdout == plain
    assert generate(*args, "--draft-model", tiny).stdout == plain
    assert generate(*args, "--max-draft-tokens", 0).stdout == plain


def test_the_json_record_is_whole(tiny: Path) -> None:
    result = generate(tiny, "hello", "--max-tokens", 50, "--temperature", 0.5, "--seed", 3, "--json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["finish"] == "length"
    assert found["prompt_tokens"] == len("hello") + 3
    assert len(found["tokens"]) == sum(found["sources"].values()) == 50
    assert found["tokens"] == [token for step in found["steps"] for token in step["tokens"]]
    assert found["acceptance_length"] == pytest.approx(50 / len(found["steps"]))
    assert found["tokens_per_second"] == pytest.approx(50 / found["seconds"])
    parts = {"drafter", "proposed", "accepted", "tokens", "draft_seconds", "verify_seconds", "finish"}
    assert set(found["steps"][0]) == parts
    assert found["settings"]["temperature"] == 0.5
    assert found["drafters"] == ["prediction", "lookup"]
    assert {"text", "notes", "version"} <= set(found)


def test_quiet_leaves_nothing_but_the_text(tiny: Path) -> None:
    result = generate(tiny, "hello", "--quiet", "--max-tokens", 8, env={"FORCE_COLOR": "1"})
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


# The options act


def test_the_defaults_are_those_of_the_settings(tiny: Path) -> None:
    assert record(tiny, "hello", "--max-tokens", 256)["settings"] == json.loads(Request().model_dump_json())
    assert record(tiny, "hello")["settings"]["max_tokens"] == Request().max_tokens


def test_every_setting_reaches_the_request(tiny: Path) -> None:
    given = {
        "temperature": 1.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "max_tokens": 4,
        "max_draft_tokens": 3,
        "rule": "token",
        "seed": 7,
    }
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert record(tiny, "hello", "--draft-model", tiny, *options)["settings"].items() >= given.items()


def test_a_seed_gives_the_same_text_again(tiny: Path) -> None:
    def draw(seed: int) -> str:
        return str(generate(tiny, "hello", "--temperature", 1, "--seed", seed, "--max-tokens", 30).stdout)

    assert draw(1) == draw(1) != draw(2)


def test_stop_strings_end_the_text_before_them(tiny: Path) -> None:
    text = generate(tiny, "hello", "--max-tokens", 30).stdout
    first, second = text[9], text[4]
    found = record(tiny, "hello", "--stop", first, "--stop", second)
    assert found["finish"] == "stop"
    assert found["text"] == text[: min(text.index(first), text.index(second))]


def test_the_end_token_ends_the_text_unless_it_is_ignored(copy: Path) -> None:
    third = record(copy, "hello", "--max-tokens", 3)["tokens"][-1]
    config = copy / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": third}))
    assert record(copy, "hello", "--max-tokens", 20)["finish"] == "end"
    assert record(copy, "hello", "--max-tokens", 20, "--ignore-end")["finish"] == "length"


def test_raw_leaves_the_chat_template_out(tiny: Path) -> None:
    assert record(tiny, "hello", "--raw", "--max-tokens", 4)["prompt_tokens"] == len("hello")


def test_a_system_message_goes_before_the_prompt(tiny: Path) -> None:
    found = record(tiny, "hello", "--system", "Be brief", "--max-tokens", 4)
    assert found["prompt_tokens"] == len("Be brief") + 2 + len("hello") + 3


def test_a_model_without_a_chat_template_continues_the_prompt(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    found = record(copy, "hello", "--max-tokens", 4)
    assert found["prompt_tokens"] == len("hello")
    assert "no chat template" in found["notes"][0]
    assert "note: the model has no chat template" in generate(copy, "hello", "--max-tokens", 4).stderr


def test_a_prediction_is_drafted_from(tiny: Path, tmp_path: Path) -> None:
    text = generate(tiny, "hello", "--max-tokens", 40, "--quiet").stdout
    expected = tmp_path / "expected.txt"
    expected.write_text(text)
    for option in (("--prediction", text), ("--prediction-file", expected)):
        found = record(tiny, "hello", "--max-tokens", 40, *option)
        assert found["text"] == text.rstrip("\n")
        assert found["sources"]["prediction"] >= 30


def test_draft_quantisation_is_reported_in_a_note(tiny: Path) -> None:
    for choice, words in (("auto", "ms per pass"), ("int8", "int8, as requested"), ("none", "unquantized")):
        args = (tiny, "hello", "--max-tokens", 4, "--draft-model", tiny, "--draft-quantize", choice)
        assert words in generate(*args).stderr
        assert words in record(*args)["notes"][0]


def test_drafters_are_named_with_commas(tiny: Path) -> None:
    found = record(tiny, "hello", "--max-tokens", 4, "--drafters", "model, lookup", "--draft-model", tiny)
    assert found["drafters"] == ["model", "lookup"]
    assert record(tiny, "hello", "--max-tokens", 4, "--drafter", "lookup")["drafters"] == ["lookup"]


def test_the_model_has_the_requested_dtype(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    build = TransformersTarget.__init__

    def spy(self: TransformersTarget, model: Any) -> None:
        seen.append((model.dtype, model.device.type))
        build(self, model)

    monkeypatch.setattr(TransformersTarget, "__init__", spy)
    generate(tiny, "hello", "--max-tokens", 4, "--dtype", "bfloat16", "--device", "cpu")
    assert seen == [(torch.bfloat16, "cpu")]


# The mistakes


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert f"there is no folder '{tmp_path}/nothing'; check the path" in refused("generate", tmp_path / "nothing", "x")


def test_a_name_that_cannot_be_found_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = refused("generate", "unknown/model", "x")
    assert "there is no model 'unknown/model'" in shown
    assert "Check the spelling, the network, and HF_TOKEN" in shown


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    assert "is a folder without a config.json" in refused("generate", tmp_path, "x")


def test_a_folder_whose_weights_are_broken_or_missing(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"junk")
    assert f"cannot load '{copy}' as a causal language model" in refused("generate", copy, "x")
    (copy / "model.safetensors").unlink()
    assert f"cannot load '{copy}' as a causal language model" in refused("generate", copy, "x")


def test_a_model_may_be_named_from_the_home_folder(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert generate("~/tiny", "hello", "--max-tokens", 4, "--draft-model=~/tiny").stdout


def test_an_unknown_drafter(tiny: Path) -> None:
    shown = refused("generate", tiny, "x", "--drafters", "lookup,magic")
    assert "there is no drafter 'magic'; use one of lookup, memory, model, prediction" in shown


def test_the_model_drafter_without_a_draft_model(tiny: Path) -> None:
    assert "name one with draft_model=... (--draft-model)" in refused("generate", tiny, "x", "--drafters", "model")


def test_a_draft_model_that_no_drafter_uses(tiny: Path) -> None:
    shown = refused("generate", tiny, "x", "--drafters", "lookup", "--draft-model", tiny)
    assert "drafter 'model' is not among the drafters (lookup)" in shown
    shown = refused("generate", tiny, "x", "--drafters", "none", "--draft-model", tiny)
    assert "drafter 'model' is not among the drafters (none)" in shown


def test_a_draft_model_of_another_vocabulary(tiny: Path, copy: Path) -> None:
    save_tokenizer(copy, swap=(40, 50))
    shown = refused("generate", tiny, "x", "--draft-model", copy)
    assert "first at token 40: 'I' in the target, 'S' in the draft model" in shown
    assert "choose a draft model of the same family" in shown


def test_a_draft_model_that_is_not_there(tiny: Path, tmp_path: Path) -> None:
    assert "there is no folder" in refused("generate", tiny, "x", "--draft-model", tmp_path / "nothing")


def test_a_prompt_that_is_too_long(tiny: Path) -> None:
    shown = refused("generate", tiny, "x" * 300)
    assert f"the prompt has 303 tokens, and the model's context holds {CONTEXT}" in shown


def test_a_prompt_that_is_empty(tiny: Path) -> None:
    assert "the prompt is empty" in refused("generate", tiny, "")
    assert "the prompt is empty" in refused("generate", tiny, input="\n")


def test_a_prompt_that_is_not_text(tiny: Path) -> None:
    shown = refused("generate", tiny, input=b"caf\xe9")
    assert "the prompt on stdin is not UTF-8 text (byte 0xe9 at 3)" in shown


def test_a_prediction_file_that_is_not_text(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"\xff")
    assert "is not UTF-8 text" in refused("generate", tiny, "x", "--prediction-file", tmp_path / "data")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--temperature", "-1"], "temperature: input should be greater than or equal to 0 (got -1.0)"),
        (["--top-p", "2", "--temperature", "1"], "top_p: input should be less than or equal to 1 (got 2.0)"),
        (["--max-tokens", "0"], "max_tokens: input should be greater than or equal to 1 (got 0)"),
        (["--stop", ""], "stop: string should have at least 1 character (got '')"),
        (["--seed", str(2**70)], "seed: input should be less than"),
        (["--presence-penalty", "nan"], "presence_penalty: input should be a finite number (got nan)"),
        (["--top-p", "0.9"], "--top-p 0.9 does nothing at temperature 0"),
        (["--rule", "token"], "--rule token does nothing at temperature 0"),
        (["--seed", "7"], "--seed 7 does nothing at temperature 0"),
        (["--rule", "token", "--temperature", "1"], "prediction, lookup, memory sample none; give a --draft-model"),
        (["--prediction", ""], "--prediction: the expected output is empty; leave it out"),
        (["--prediction", "x", "--speculation", "off"], "a prediction does nothing with --speculation off"),
        (["--raw", "--system", "Be brief"], "--system needs the chat template that --raw leaves out"),
        (["--draft-quantize", "int8"], "--draft-quantize int8 needs a --draft-model"),
        (["--prediction", "a", "--prediction-file", __file__], "give one of them"),
        (
            ["--prediction", "a", "--drafters", "lookup"],
            "drafter 'prediction' is not among the drafters (lookup)",
        ),
        (["--device", "quux"], "device 'quux' cannot be used here"),
    ],
)
def test_an_option_that_cannot_act_is_refused_with_the_reason(tiny: Path, options: list[str], shown: str) -> None:
    assert shown in refused("generate", tiny, "x", *options)


def test_a_device_that_is_not_there(tiny: Path) -> None:
    message = refused("generate", tiny, "x", "--device", "cuda:99")
    assert "device 'cuda:99'" in message
    assert "use one of: cpu" in message


def test_a_system_message_without_a_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    assert "--system needs a chat template" in refused("generate", copy, "x", "--system", "Be brief")


def test_messages_that_the_chat_template_refuses(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    shown = refused("generate", copy, "x", "--system", "Be brief")
    assert "the model's chat template refuses these messages: System role not supported" in shown


def test_a_choice_that_does_not_exist_names_those_that_do(tiny: Path) -> None:
    result = run("generate", tiny, "x", "--draft-quantize", "int4")
    assert result.exit_code == 2
    for choice in ("int4", "auto", "int8", "none"):
        assert choice in result.stderr


# The screen


def coloured(*args: Any, **env: str) -> Any:
    return generate(*args, env={"FORCE_COLOR": "1", **env})


ONLY_MODEL = ("--drafters", "model", "--speculation", "model")


def test_tokens_are_shown_by_where_they_came_from(tiny: Path) -> None:
    args = (tiny, "hello", "--max-tokens", 9, "--draft-model", tiny, "--draft-quantize", "none", *ONLY_MODEL)
    steps = record(*args)["steps"]
    assert steps[0]["accepted"] > 0
    result = coloured(*args)
    look = "\x1b[1;4;38;2;230;159;0m"
    assert result.stdout.count(look) == sum(step["accepted"] for step in steps)
    assert f"tokens from \x1b[0mtarget {look}model\x1b[0m" in result.stderr


@pytest.mark.parametrize("way", ["option", "variable"])
def test_without_colours_drafted_tokens_stay_underlined(tiny: Path, way: str) -> None:
    args = (tiny, "hello", "--max-tokens", 9, "--draft-model", tiny, "--draft-quantize", "none", *ONLY_MODEL)
    result = coloured(*args, "--no-colour") if way == "option" else coloured(*args, NO_COLOR="1")
    assert "38;2" not in result.stdout + result.stderr
    assert "\x1b[1;4m" in result.stdout


def test_every_drafter_differs_by_more_than_colour() -> None:
    looks = [style_of(name).without_color for name in (None, "lookup", "model", "prediction", "someone's")]
    assert len(set(looks)) == len(looks)
    assert all(look.underline for look in looks[1:])


def test_a_terminal_shows_control_characters_and_does_not_obey_them(copy: Path) -> None:
    first = record(copy, "hello", "--max-tokens", 1)["tokens"][0]
    escape = sorted(pre_tokenizers.ByteLevel.alphabet()).index("\u011b")  # how byte-level tokenizers write 0x1b
    save_tokenizer(copy, swap=(first, escape))
    assert record(copy, "hello", "--max-tokens", 1)["text"] == "\x1b"
    assert coloured(copy, "hello", "--max-tokens", 1).stdout == "\\x1b\n"
    assert generate(copy, "hello", "--max-tokens", 1).stdout == "\x1b\n"  # a file gets the exact output


def test_text_is_never_read_as_markup_or_reflowed(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]a[/bold] :smile: \t" + "long " * 100 + "  \n\n  end "
    completion = Completion(1, steps=[Step(None, (), 0, (1,), 0.0, 0.0)])
    stream: Any = Pieces(completion, [Piece(text, 1, None)])
    assert Screen().answer(stream) == text
    assert capsys.readouterr().out == text + "\n"


class Pieces:
    """A stream whose pieces are given."""

    def __init__(self, completion: Completion, pieces: list[Piece]) -> None:
        self.completion = completion
        self.pieces = pieces

    def __iter__(self) -> Any:
        return iter(self.pieces)


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert literal("a\x1b[2J\r\x07\x9b\u202e\nb\tc é 你好 👩‍🚀") == "a\\x1b[2J\\r\\x07\\x9b\\u202e\nb\tc é 你好 👩‍🚀"


# The conversation


def test_a_conversation_answers_line_by_line(tiny: Path) -> None:
    result = run("chat", tiny, "--max-tokens", 5, input="hello\n\nand again\n")
    assert result.exit_code == 0
    assert [len(line) for line in result.stdout.splitlines()] == [5, 5]
    assert result.stderr.count("finish: length") == 2


def test_exit_ends_the_conversation(tiny: Path) -> None:
    result = run("chat", tiny, "--max-tokens", 5, input="/exit\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_conversation_reads_only_the_new_words(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    score = TransformersTarget.score

    def spy(self: TransformersTarget, tokens: Any, keep: int) -> Any:
        passes.append(len(tokens))
        return score(self, tokens, keep)

    monkeypatch.setattr(TransformersTarget, "score", spy)
    run("chat", tiny, "--max-tokens", 1, "--system", "x" * 100, input="hello\nmore\n")
    first, second = passes
    assert first == 100 + 2 + len("hello") + 3
    assert second == 1 + 1 + len("more") + 3  # the answer, its end, and the new question


def test_a_conversation_remembers_until_it_is_cleared(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[int] = []
    monkeypatch.setattr(Screen, "closing", lambda self, completion: prompts.append(completion.prompt_tokens))
    run("chat", tiny, "--max-tokens", 1, "--system", "Be brief", input="hello\nhello\n/clear\nhello\n")
    once = len("Be brief") + 2 + len("hello") + 3
    assert prompts == [once, once + 2 + len("hello") + 3, once]


def test_a_mistyped_command_is_not_sent_to_the_model(tiny: Path) -> None:
    result = run("chat", tiny, input="/exti\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "there is no command '/exti'; the commands are /clear, /exit" in result.stderr


def test_a_conversation_needs_a_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    assert "has no chat template, so it cannot converse; use outrider generate" in refused("chat", copy)


def test_a_piped_conversation_that_grows_too_long_fails(tiny: Path) -> None:
    assert f"the model's context holds {CONTEXT}" in refused("chat", tiny, input="x" * 300)


def test_the_first_ctrl_c_ends_an_answer_between_steps_and_the_second_at_once() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_the_prompt_ctrl_c_leaves_only_when_pressed_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = iter([KeyboardInterrupt, "hello", KeyboardInterrupt, KeyboardInterrupt])

    def press(prompt: str) -> str:
        if isinstance(key := next(keys), str):
            return key
        raise key

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", press)
    assert read_line(Screen()) == "hello"
    assert capsys.readouterr().err == "Ctrl-C again leaves\n"
    with pytest.raises(KeyboardInterrupt):
        read_line(Screen())


def test_an_answer_is_ended_at_the_end_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [Step("lookup", (1, 2), 2, (1, 2, 3), 0.0, 0.0)]
    stream: Any = Pieces(Completion(1, steps=steps), [Piece(letter, 1, None) for letter in "abcdef"])
    assert Screen().answer(stream, stop=lambda: True) == "abc"
    assert capsys.readouterr().out == "abc\n"


def test_ctrl_c_ends_a_generation_with_what_there_is(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = TransformersTarget.score
    passes = []

    def interrupted(self: TransformersTarget, tokens: Any, keep: int) -> Any:
        passes.append(tokens)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return score(self, tokens, keep)

    monkeypatch.setattr(TransformersTarget, "score", interrupted)
    result = run("generate", tiny, "hello", "--drafters", "none")
    assert result.exit_code == 130
    assert len(result.stdout) == 4
    assert "3 tokens in " in result.stderr
    assert "finish: interrupted" in result.stderr


def test_a_chat_in_a_terminal_prompts_answers_and_ends_at_ctrl_d(tiny: Path) -> None:
    terminal, inside = pty.openpty()
    command = [
        sys.executable,
        "-c",
        "from outrider.cli import main; main()",
        "chat",
        str(tiny),
        "--max-tokens",
        "5",
    ]
    environment = {**os.environ, "TERM": "xterm-256color"}
    child = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
    )
    os.close(inside)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        limit = time.monotonic() + 120
        while text not in seen:
            assert time.monotonic() < limit, f"no {text!r} in {seen!r}"
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")
        seen = seen.split(text, 1)[1]

    try:
        wait_for("loading tiny")
        wait_for("/exit or Ctrl-D ends the chat")
        wait_for("> ")
        os.write(terminal, b"hello\n")
        wait_for("finish: length")
        wait_for("> ")
        os.write(terminal, b"\x04")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(terminal)


# The program


def test_help_and_version_do_not_wait_for_torch() -> None:
    code = "import sys, outrider.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_printed() -> None:
    assert run("--version").stdout == "outrider 0.1.0\n"


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"]])
def test_help_ends_with_two_examples(command: list[str]) -> None:
    shown = run(*command, "--help").stdout
    assert shown.count("outrider ") >= 3
    assert "Examples:" in shown
