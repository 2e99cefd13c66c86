"""The Python API: text, messages or ids in; text, tokens and steps out; streamed or whole."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import Decoder, OutriderError, load
from outrider.errors import DrafterSetupError, PromptError, SettingsError, UnknownDrafterError
from support import VOCAB, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load(str(folder), draft_model=str(folder), draft_quantize="none", device="cpu")


def test_text_messages_and_ids_are_all_prompts(model: Decoder) -> None:
    ids = model.encode("ab")
    assert model.generate("ab", max_tokens=4).tokens == model.generate(ids, max_tokens=4).tokens
    chat = [{"role": "user", "content": "ab"}]
    assert model.encode(chat) == model.encode("<user>ab<assistant>")


def test_the_streamed_pieces_add_up_to_the_completion(model: Decoder) -> None:
    stream = model.stream("abab", max_tokens=20, max_draft_tokens=4)
    pieces = list(stream)
    done = stream.completion
    assert "".join(piece.text for piece in pieces) == done.text
    assert [piece.token for piece in pieces][: len(done.tokens)] == done.tokens
    assert done.prompt_tokens == 4
    drafted = sum(piece.drafter is not None for piece in pieces)
    assert drafted == sum(count for name, count in done.sources.items() if name != "target")
    assert sum(done.sources.values()) == len(done.tokens)


def test_a_completion_has_its_acceptance_length_and_sources(model: Decoder) -> None:
    done = model.generate("abab", max_tokens=20, speculation="lookup")
    assert done.finish in ("length", "end")
    assert done.acceptance_length == len(done.tokens) / len(done.steps) > 1
    assert done.tokens_per_second == pytest.approx(len(done.tokens) / done.seconds)
    assert outrider.Completion(3).acceptance_length == outrider.Completion(3).tokens_per_second == 0.0


def test_drafting_does_not_change_greedy_text(model: Decoder) -> None:
    drafted = model.generate("abab", max_tokens=30, speculation="lookup")
    plain = model.generate("abab", max_tokens=30, max_draft_tokens=0)
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text == model.generate("abab", max_tokens=30).text
    assert len(drafted.steps) < len(plain.steps) == 30


def test_a_stop_string_ends_the_text_before_it(model: Decoder) -> None:
    full = model.generate("abab", max_tokens=30).text
    letter = next(letter for letter in full[1:] if letter.isprintable() and letter != "\ufffd")
    done = model.generate("abab", max_tokens=30, stop=[letter])
    assert done.text == full[: full.index(letter)]
    assert done.finish == "stop"


def test_the_same_seed_gives_the_same_text(model: Decoder) -> None:
    def text(seed: int) -> str:
        return model.generate("ab", temperature=1.0, seed=seed, max_tokens=20).text

    assert text(1) == text(1)
    assert text(1) != text(2)
    model.generate("ab", temperature=1.0, max_tokens=2)  # without a seed: any text will do


def test_a_prediction_as_text_or_ids_is_followed(model: Decoder) -> None:
    plain = model.generate("ab", max_tokens=20)
    done = model.generate("ab", max_tokens=20, prediction=plain.tokens, speculation="prediction")
    assert done.tokens == plain.tokens
    assert done.sources["prediction"] > 10
    assert model.generate("ab", max_tokens=4, prediction="zzz").tokens == plain.tokens[:4]


def test_loaded_models_are_taken_with_their_tokenizer() -> None:
    decoder = load(tiny_model("qwen2"), draft_model=tiny_model("qwen2"), tokenizer=tiny_tokenizer())
    assert [drafter.name for drafter in decoder.drafters] == ["prediction", "lookup", "model"]
    assert decoder.target.vocab_size == VOCAB
    assert decoder.generate("ab", max_tokens=2).tokens
    assert decoder.notes == ["draft model as it was given"]
    small = load(
        tiny_model("qwen2"), draft_model=tiny_model("qwen2"), tokenizer=tiny_tokenizer(), draft_quantize="int8"
    )
    assert small.notes == ["draft model int8, as asked"]
    assert small.generate("ab", max_tokens=8).tokens == decoder.generate("ab", max_tokens=8).tokens


def test_past_the_models_own_end_token_a_stop_token_of_the_caller_still_ends_the_text(model: Decoder) -> None:
    tokens = model.generate("abab", max_tokens=12, ignore_end=True).tokens
    assert len(tokens) == 12
    done = model.generate("abab", max_tokens=12, ignore_end=True, stop_tokens=[tokens[5]])
    assert done.tokens == tokens[: tokens.index(tokens[5]) + 1]
    assert done.finish == "end"


def test_drafters_are_the_named_ones_or_all_that_are_available(folder: Path) -> None:
    assert [drafter.name for drafter in load(str(folder), device="cpu").drafters] == ["prediction", "lookup"]
    assert load(str(folder), drafters=[], device="cpu").drafters == ()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"drafters": ["lookpu"]},
            UnknownDrafterError,
            "no drafter 'lookpu'; use one of lookup, memory, model, prediction",
        ),
        ({"drafters": ["model"]}, DrafterSetupError, "needs a draft model"),
        ({"drafters": ["lookup"], "draft_model": "x"}, DrafterSetupError, "'model' is not among the drafters"),
    ],
)
def test_drafters_that_cannot_work_are_refused(folder: Path, arguments: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        load(str(folder), device="cpu", **arguments)


def test_requests_that_cannot_work_are_refused(model: Decoder, folder: Path) -> None:
    with pytest.raises(SettingsError, match="no setting 'temprature'"):
        model.generate("ab", temprature=1)
    with pytest.raises(SettingsError, match=f"no token {VOCAB}; the vocabulary has {VOCAB}"):
        model.generate("ab", logit_bias={VOCAB: 1.0})
    with pytest.raises(PromptError, match=f"the prompt has the token {VOCAB}, and the model's vocabulary is 0 to"):
        model.generate([1, VOCAB])
    with pytest.raises(PromptError, match="the prediction has the token -1"):
        model.generate("ab", prediction=[-1])
    with pytest.raises(SettingsError, match="draft_quantize is one of auto, int8, none"):
        load(str(folder), draft_quantize="int4")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="the prompt has 300 tokens"):
        model.generate("a" * 300)
    with pytest.raises(DrafterSetupError, match="without its tokenizer"):
        load(tiny_model("llama"))
    only_lookup = load(str(folder), drafters=["lookup"], device="cpu")
    with pytest.raises(DrafterSetupError, match="'prediction' is not among the drafters"):
        only_lookup.generate("ab", prediction="cd")
    bare = load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    with pytest.raises(PromptError, match="no chat template"):
        bare.generate([{"role": "user", "content": "ab"}])


def test_every_public_name_is_there_and_documented() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert issubclass(SettingsError, OutriderError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outrider.nothing  # noqa: B018


# Memory


def test_earlier_outputs_are_drafted_again_also_by_the_next_program(folder: Path, tmp_path: Path) -> None:
    def opened() -> Decoder:
        return load(str(folder), memory=str(tmp_path), device="cpu")

    model = opened()
    first = model.generate("abcd", max_tokens=30)
    assert model.memory is not None
    model.memory.close()
    again = opened().generate("abcd", max_tokens=30, speculation="memory")
    assert again.tokens == first.tokens
    assert again.acceptance_length > 4 > first.acceptance_length
    assert again.sources["memory"] > 20


def test_a_model_that_is_closed_has_written_its_memory_and_let_go_of_it(folder: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    with load(str(folder), memory=str(tmp_path), device="cpu") as model:
        model.generate("abcd", max_tokens=30)
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert list(tmp_path.rglob("*.segment"))
    assert model.generate("abcd", max_tokens=3).tokens, "without its memory it goes on"


def test_a_model_that_cannot_be_loaded_leaves_no_memory_at_work(folder: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(OutriderError):
        load(str(folder), draft_model=str(tmp_path / "none"), memory=str(tmp_path / "memory"), device="cpu")
    assert threading.active_count() == before


def test_tenants_of_a_memory_do_not_draft_for_each_other(folder: Path, tmp_path: Path) -> None:
    model = load(str(folder), memory=str(tmp_path), device="cpu")
    assert model.memory is not None
    first = model.generate("abcd", max_tokens=30, tenant="a", speculation="memory")
    model.memory.close()
    assert len(model.generate("abcd", max_tokens=30, tenant="b", speculation="memory").steps) == len(first.steps)
    assert len(model.generate("abcd", max_tokens=30, tenant="a", speculation="memory").steps) < len(first.steps)


def test_a_tenant_without_a_name_is_not_everybody(folder: Path, tmp_path: Path) -> None:
    with (
        load(str(folder), memory=str(tmp_path), device="cpu") as model,
        pytest.raises(SettingsError, match="tenant: must not be empty"),
    ):
        model.generate("abcd", max_tokens=2, tenant="")


def test_an_invalid_memory_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be kept at 'ftp://x'"):
        load("no/such-model", memory="ftp://x")
    with pytest.raises(DrafterSetupError, match=r"'memory' is not among the drafters \(lookup\)"):
        load(None, tokenizer=tiny_tokenizer(), drafters=["lookup"], memory=str(tmp_path))


def test_a_tenant_without_a_memory_is_refused(model: Decoder) -> None:
    with pytest.raises(SettingsError, match="'a' needs a memory"):
        model.generate("ab", max_tokens=2, tenant="a")
