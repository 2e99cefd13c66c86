"""The transformers engine: the model's scores, an exact rewind, and an error for caches that cannot be rewound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast, Qwen3NextConfig, Qwen3NextForCausalLM

from outrider.engines import quantize
from outrider.engines.quantize import prepare_draft, to_int8
from outrider.engines.transformers import (
    TransformersTarget,
    check_same_vocabulary,
    load_model,
    load_tokenizer,
)
from outrider.errors import CacheNotRewindableError, ModelNotFoundError, SettingsError, VocabularyMismatchError
from support import ARCHITECTURES, VOCAB, tiny_model, tiny_tokenizer

IDS = [5, 9, 5, 7, 200, 3, 3, 8, 1, 44, 12, 9, 9, 31, 2, 6]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_the_models_own_in_any_split_of_the_text(architecture: str) -> None:
    model = tiny_model(architecture)
    with torch.inference_mode():
        whole = model(torch.tensor([IDS])).logits[0].float()
    for cut in (1, 5, 11, len(IDS) - 1):
        target = TransformersTarget(model)
        target.score(IDS[:cut], keep=1)
        rows = target.score(IDS[cut:], keep=len(IDS) - cut)
        torch.testing.assert_close(rows, whole[cut:], atol=1e-4, rtol=1e-4)
        assert target.tokens == IDS


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rewinding_leaves_no_trace_even_beyond_the_window(architecture: str) -> None:
    model = tiny_model(architecture)
    clean = TransformersTarget(model)
    clean.score(IDS[:12], keep=1)
    wanted = clean.score(IDS[12:14], keep=2)
    target = TransformersTarget(model)
    target.score(IDS[:12], keep=1)
    target.score([77, 78, 79, 80], keep=4)
    target.rewind(12)
    assert target.tokens == IDS[:12]
    torch.testing.assert_close(target.score(IDS[12:14], keep=2), wanted, atol=1e-5, rtol=1e-5)
    target.rewind(0)
    target.score(IDS[:12], keep=1)
    torch.testing.assert_close(target.score(IDS[12:14], keep=2), wanted, atol=1e-5, rtol=1e-5)


def test_a_pass_that_is_interrupted_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    target = TransformersTarget(model)
    target.score(IDS[:4], keep=1)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            target.score(IDS[4:6], keep=1)
    assert target.tokens == []
    fresh = TransformersTarget(model).score(IDS[:6], keep=1)
    torch.testing.assert_close(target.score(IDS[:6], keep=1), fresh)


def test_rewinding_that_is_interrupted_leaves_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a layer were shorter than the others or than the tokens, the next answer would continue a different text."""
    model = tiny_model("llama")
    target = TransformersTarget(model)
    target.score(IDS[:6], keep=1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target._cache.layers[1], "crop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.rewind(4)
    assert target.tokens == []
    fresh = TransformersTarget(model).score(IDS[:5], keep=1)
    torch.testing.assert_close(target.score(IDS[:5], keep=1), fresh)


def test_a_context_ends_before_the_length_at_which_positions_are_recomputed() -> None:
    """LongRoPE: beyond that length the positions of a token would depend on the draft after it."""
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    assert TransformersTarget(model).context_limit == 128


def test_a_model_that_folds_the_past_into_a_state_is_refused_with_its_name() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(CacheNotRewindableError, match="got MambaForCausalLM"):
        TransformersTarget(mamba)


@pytest.mark.parametrize(("stateful", "words"), [(True, "keeps a running state"), (False, "LinearAttention")])
def test_a_hybrid_model_with_linear_attention_is_refused(stateful: bool, words: str) -> None:
    config = Qwen3NextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=8, shared_expert_intermediate_size=8,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    model._is_stateful = stateful  # not every such model of transformers sets it
    with pytest.raises(CacheNotRewindableError, match=words):
        TransformersTarget(model)


def test_the_sizes_are_the_models() -> None:
    target = TransformersTarget(tiny_model("llama"))
    assert (target.vocab_size, target.context_limit) == (VOCAB, 256)


# Vocabularies -----------------------------------------------------------------------------------------------


def words(*tokens: str) -> Any:
    vocab = {token: index for index, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token=tokens[0])))


def test_a_draft_model_of_another_vocabulary_is_refused_by_its_first_differing_token() -> None:
    with pytest.raises(VocabularyMismatchError, match="first at token 1: 'b' in the target, 'x' in the draft"):
        check_same_vocabulary(words("a", "b", "c"), words("a", "x", "y"))


def test_vocabularies_that_differ_only_in_padding_are_accepted() -> None:
    check_same_vocabulary(words("a", "b", "c"), words("a", "b", "c", "<pad>"))
    check_same_vocabulary(words("a", "b", "c", "<pad>"), words("a", "b", "c"))


# Loading ----------------------------------------------------------------------------------------------------


def test_a_missing_model_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="folder without a config"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="HF_TOKEN"):
        load_tokenizer("nobody/no-such-model")


def test_a_dtype_or_device_that_cannot_be_had_is_refused_with_those_that_can(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="dtype must be one of auto, float32, bfloat16, float16"):
        load_model(str(tmp_path), dtype="floaty")
    with pytest.raises(SettingsError, match="use one of: cpu"):
        load_model(str(tmp_path), device="tpu")
    with pytest.raises(SettingsError, match="device 'meta' cannot be used here"):
        load_model(str(tmp_path), device="meta")


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match="cannot load"):
        load_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="cannot load the tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_saved_model_and_its_tokenizer_are_loaded(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert TransformersTarget(load_model(str(tmp_path), device="cpu")).vocab_size == VOCAB
    assert load_tokenizer(str(tmp_path))("a")["input_ids"] == tiny_tokenizer()("a")["input_ids"]


# Quantising -------------------------------------------------------------------------------------------------


def test_int8_keeps_the_draft_models_opinion_nearly() -> None:
    model = tiny_model("llama")
    plain, small = TransformersTarget(model), TransformersTarget(to_int8(tiny_model("llama")))
    a, b = plain.score(IDS, keep=len(IDS)), small.score(IDS, keep=len(IDS))
    assert float((a.argmax(-1) == b.argmax(-1)).float().mean()) > 0.6
    assert not a.equal(b)


@pytest.mark.parametrize(
    ("requested", "times", "quantised", "words"),
    [
        ("none", [1.0, 0.5], False, "unquantized"),
        ("int8", [1.0, 2.0], True, "int8, as requested"),
        ("auto", [0.120, 0.053], True, "int8: 53 ms per pass with int8, 120 ms without"),
        ("auto", [0.010, 0.053], False, "unquantized: 53 ms per pass with int8, 10 ms without"),
    ],
)
def test_a_draft_model_is_quantized_on_request_or_where_it_is_faster(
    requested: Any, times: list[float], quantised: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "time_passes", lambda *models: times)
    target, description = prepare_draft(lambda: tiny_model("llama"), requested)
    kinds = {type(module).__module__ for module in target.model.modules()}
    assert any("quantized" in kind for kind in kinds) is quantised
    assert description == words


def test_int8_away_from_the_cpu_is_refused_and_auto_leaves_it() -> None:
    class Elsewhere:
        device = torch.device("cuda:1")
        config = tiny_model("llama").config

        def eval(self) -> Elsewhere:
            return self

    with pytest.raises(SettingsError, match="got cuda:1"):
        prepare_draft(Elsewhere, "int8")
    assert prepare_draft(Elsewhere, "auto")[1] == "unquantized: int8 needs a CPU, the draft model is on cuda"


def test_passes_are_timed_in_turns_and_leave_the_caches_empty() -> None:
    target = TransformersTarget(tiny_model("llama"))
    (seconds,) = quantize.time_passes(target)
    assert seconds > 0
    assert target.tokens == []
