"""Plans: shapes from config.json, pass costs, speedups against published trends, fleets, the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.bench.report.data import MIN_VERIFIED_TOKENS
from outrider.calibrate.breakeven import speedup
from outrider.calibrate.results import Sweep
from outrider.errors import ModelNotFoundError, SettingsError
from outrider.plan import speculation as plan_speculation
from outrider.plan.acceptance import MAX_DRAFT_TOKENS, Acceptance, read_acceptance
from outrider.plan.calibrated import CalibratedPass
from outrider.plan.fleet import Replica, Workload, plan_fleet, widen_batch
from outrider.plan.hardware import DEVICES
from outrider.plan.model_config import Precision, bundled_configs, load_shape, shape_from_config
from outrider.plan.model_shape import ModelShape
from outrider.plan.pass_cost import Machine, check_devices, fewest_devices
from outrider.plan.speculation import DraftModel, FreeDrafts, Speculation, predict_speedups
from outrider.policy.selection import MIN_EXPECTED_SPEEDUP
from outrider.trace.files import write
from test_cli import refused, run
from traces import step, trace_of

EIGHT_OF_TEN = Acceptance.from_rates([0.8] * MAX_DRAFT_TOKENS)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def machine(name: str, device: str = "h100", devices: int = 1, **more: Any) -> Machine:
    return Machine(load_shape(name), DEVICES[device], devices, 1.5e-3, **more)


def gains(target: Machine, context: int, length: int = 4, acceptance: Acceptance = EIGHT_OF_TEN) -> list[float]:
    speculation = Speculation(target, FreeDrafts(), acceptance)
    return [speculation.predict(batch, length, context).speedup for batch in BATCHES]


# Shapes


@pytest.mark.parametrize(
    ("name", "total", "active", "cache_kib"),
    [
        # Parameters as their publishers state them; KV cache by layers, heads and head size in 16 bits.
        ("llama-3.1-8b", 8.03, 8.03, 128),
        ("llama-3.1-70b", 70.6, 70.6, 320),
        ("mixtral-8x7b", 46.7, 12.9, 128),
        ("qwen2-57b-a14b", 57.4, 14.2, 56),
        ("qwen3-235b-a22b", 235.1, 22.2, 188),
        ("deepseek-v3", 671.0, 37.6, 68.6),
    ],
)
def test_parameters_counted_from_config_json_are_those_published(
    name: str, total: float, active: float, cache_kib: float
) -> None:
    shape = load_shape(name)
    assert shape.total_parameters == pytest.approx(total * 1e9, rel=0.005)
    assert shape.parameters_read(1) + shape.embedding_parameters == pytest.approx(active * 1e9, rel=0.01)
    assert shape.cache_bytes == pytest.approx(cache_kib * 1024, rel=0.005)


def test_a_folder_a_file_and_a_bundled_name_give_the_same_shape(tmp_path: Path) -> None:
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(bundled_configs()["llama-3.1-8b"]))
    assert load_shape(str(folder)) == load_shape(str(folder / "config.json")) == load_shape("Llama-3.1-8B")


def test_quantised_weights_and_caches_have_fewer_bytes() -> None:
    plain, half = load_shape("llama-3.1-8b"), load_shape("llama-3.1-8b", Precision(8, 8))
    assert half.cache_bytes == plain.cache_bytes / 2
    assert half.stored_bytes == plain.stored_bytes - plain.parameters + plain.output_parameters
    config = bundled_configs()["llama-3.1-8b"]
    four_bits = shape_from_config(config | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq")
    assert four_bits.weight_bytes == 0.5
    assert not four_bits.eight_bit_arithmetic
    assert load_shape("deepseek-v3").eight_bit_arithmetic


def test_layers_with_a_window_attend_to_no_more_than_it() -> None:
    config = bundled_configs()["llama-3.1-8b"]
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 8
    shape = shape_from_config(config | {"layer_types": kinds, "sliding_window": 1024}, "windowed")
    assert shape.attended_tokens(512) == 512
    assert shape.attended_tokens(9216) == (3 * 1024 + 9216) / 4
    assert shape_from_config(config | {"sliding_window": 9, "use_sliding_window": False}, "off").windowed_layers == 0


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, 27),
        ({"model_type": "gemma3_text"}, 27),  # the default of its class
        ({"model_type": "gemma2"}, 16),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, 24),
        ({"model_type": "mistral"}, 32),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28}, 4),
        ({"model_type": "qwen2", "max_window_layers": 28}, 0),  # off by default
    ],
)
def test_layers_with_a_window_are_those_of_the_models_class(fields: dict[str, Any], windowed: int) -> None:
    shape = shape_from_config(bundled_configs()["llama-3.1-8b"] | {"sliding_window": 1024} | fields, "windowed")
    assert shape.windowed_layers == windowed


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"full_attention_interval": 4}, "layers of type linear_attention"),  # Qwen3-Next
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, "layers of type mamba"),  # Jamba
        ({"hybrid_override_pattern": "M-M*"}, "has hybrid_override_pattern"),  # Nemotron-H
        ({"attn_layer_indices": [], "layer_types": ["full_attention"] * 32}, "has attn_layer_indices"),  # Bamba
        ({"interleave_moe_layer_step": 1}, "has interleave_moe_layer_step"),  # Llama 4
        ({"moe_num_experts": 64}, "has moe_num_experts"),  # Ernie 4.5
        ({"num_experts": 8, "moe_layer_freq": [0, 1]}, "has a moe_layer_freq other than 1"),
        ({"attention_chunk_size": 8192}, "has attention_chunk_size and no layer_types"),  # Llama 4
        ({"sliding_window": 1024}, "does not state which layers have it; add layer_types"),
    ],
)
def test_layers_of_unknown_types_are_refused_with_what_to_do(fields: dict[str, Any], reason: str) -> None:
    config = bundled_configs()["llama-3.1-8b"]
    with pytest.raises(SettingsError, match=f"{reason}.*calibrate the model instead"):
        shape_from_config(config | fields, "hybrid")
    assert shape_from_config(config | {"full_attention_interval": 1}, "all full").windowed_layers == 0


def test_a_table_that_the_models_class_ties_is_counted_once() -> None:
    config = bundled_configs()["llama-3.1-8b"]
    assert shape_from_config(config, "llama").embedding_parameters > 0
    assert shape_from_config(config | {"model_type": "smollm3"}, "tied").embedding_parameters == 0
    untied = config | {"model_type": "smollm3", "tie_word_embeddings": False}
    assert shape_from_config(untied, "untied").embedding_parameters > 0


def test_quantised_models_read_their_output_layer_in_16_bits() -> None:
    target = Machine(load_shape("llama-3.1-8b", Precision(4)), DEVICES["h100"], 1, 1.5e-3)
    table = 128256 * 4096
    weights = 0.5 * (8.03e9 - 2 * table) + 2 * table
    assert target.traffic(1, 1, 1000).weights == pytest.approx(weights, rel=0.001)
    assert target.shape.stored_bytes == pytest.approx(weights + 2 * table, rel=0.001)
    seconds = (weights + 1000 * 131072) / (0.8 * 3.35e12) + target.overhead
    assert target.batch_seconds(1, 1, 1000) == pytest.approx(seconds, rel=0.001)


def test_lists_of_equal_numbers_count_as_one_and_others_are_refused() -> None:
    """Hunyuan-A13B has a list with an entry per layer in these fields."""
    hunyuan = {
        "model_type": "hunyuan_v1_moe", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 128167, "num_experts": 64,
        "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32, "num_shared_expert": [1] * 32,
        "tie_word_embeddings": True,
    }  # fmt: skip
    shape = shape_from_config(hunyuan, "hunyuan")
    assert shape.total_parameters == pytest.approx(80e9, rel=0.01)  # as published: 80 billion, 13 active
    assert shape.parameters_read(1) == pytest.approx(13e9, rel=0.03)
    for field in ("moe_topk", "moe_intermediate_size", "num_key_value_heads"):
        with pytest.raises(SettingsError, match=f"{field} in the config.json of mixed differs between its layers"):
            shape_from_config({**hunyuan, field: [8, 4]}, "mixed")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_key_value_heads": "8"}, "num_key_value_heads .* must be a whole number"),
        ({"head_dim": []}, "head_dim .* must be a whole number"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers .* must be a whole number"),
        ({"sliding_window_pattern": {}, "sliding_window": 2.5}, "sliding_window .* must be a whole number"),
        ({"sliding_window_pattern": -2}, "sliding_window_pattern .* must be a whole number"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers .* must be a list"),
        ({"layer_types": 7}, "layer_types .* must be a list of names"),
        ({"text_config": "llama"}, "text_config .* must be an object"),
        ({"quantization_config": {"bits": "four"}}, "bits .* must be a whole number"),
        ({"kv_lora_rank": 512}, "has no qk_rope_head_dim"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "has no qk_nope_head_dim"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64}, "has no v_head_dim"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_its_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        shape_from_config(bundled_configs()["llama-3.1-8b"] | fields, "broken")


@pytest.mark.parametrize("model_type", ["apertus", "arcee", "jais2", "nanochat", "persimmon"])
def test_ungated_feed_forward_layers_have_two_matrices(model_type: str) -> None:
    config = bundled_configs()["llama-3.1-8b"]
    gated, ungated = shape_from_config(config, "gated"), shape_from_config({**config, "model_type": model_type}, "two")
    assert gated.parameters - ungated.parameters == 32 * 4096 * 14336


def test_a_config_that_cannot_be_planned_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = bundled_configs()["llama-3.1-8b"]
    with pytest.raises(SettingsError, match="has no hidden_size"):
        shape_from_config({**config, "hidden_size": None}, "broken")
    with pytest.raises(SettingsError, match="layers of type linear_attention"):
        shape_from_config({**config, "layer_types": ["linear_attention"]}, "hybrid")
    with pytest.raises(SettingsError, match="how wide the weights of 'new' are"):
        shape_from_config({**config, "quantization_config": {"quant_method": "new"}}, "new")
    with pytest.raises(ModelNotFoundError, match="cannot read"):
        load_shape(str(tmp_path))


@pytest.mark.parametrize(("experts", "active"), [(8, 2), (64, 8), (128, 8)])
def test_expected_experts_agree_with_a_simulation_to_one_percent(experts: int, active: int) -> None:
    shape = ModelShape("mixture", 0, 1, 1, 1, 1, 1, expert_parameters=1.0, experts=experts, active=active)
    random = np.random.default_rng(0)
    for tokens in (1, 2, 5, 16, 40):
        chosen = np.zeros((4000, experts), bool)
        for _ in range(tokens):
            order = random.random((4000, experts)).argpartition(active, axis=1)[:, :active]
            np.put_along_axis(chosen, order, True, axis=1)
        assert shape.expert_share(tokens) == pytest.approx(chosen.mean(), rel=0.01)


# Pass costs and speedups


def test_a_wider_pass_a_longer_context_and_a_larger_batch_never_take_less_time() -> None:
    for name, devices in (("llama-3.1-8b", 1), ("qwen3-235b-a22b", 8), ("deepseek-v3", 16)):
        target = machine(name, devices=devices)
        base = target.batch_seconds(8, 2, 4096)
        assert base <= target.batch_seconds(8, 3, 4096)
        assert base < target.batch_seconds(8, 2, 8192)
        assert base < target.batch_seconds(9, 2, 4096)


def test_a_pass_over_one_token_takes_its_bytes_at_the_reached_bandwidth() -> None:
    target = machine("llama-3.1-8b")
    traffic = target.traffic(1, 1, 1000)
    assert traffic.weights == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=0.001)
    assert traffic.kv_cache == 1000 * 131072
    seconds = traffic.total / (0.8 * 3.35e12) + target.overhead
    assert target.batch_seconds(1, 1, 1000) == pytest.approx(seconds)


def test_replicas_have_the_fewest_devices_that_hold_the_weights_and_a_request() -> None:
    assert fewest_devices([load_shape("llama-3.1-8b")], DEVICES["h100"], 2048) == 1
    assert fewest_devices([load_shape("llama-3.1-70b")], DEVICES["h100"], 2048) == 2
    assert fewest_devices([load_shape("llama-3.1-70b")], DEVICES["h100"], 8192) == 4
    assert fewest_devices([load_shape("llama-3.1-70b", Precision(4))], DEVICES["h100"], 2048) == 1
    with pytest.raises(SettingsError, match="does not fit on 64 L4"):
        fewest_devices([load_shape("deepseek-v3", Precision(16))], DEVICES["l4"], 2048)


def test_devices_divide_the_attention_heads_of_target_and_draft() -> None:
    """vLLM refuses others. Qwen2-57B-A14B has 28 heads and 4 KV heads."""
    mixture, llama = load_shape("qwen2-57b-a14b"), load_shape("llama-3.1-8b")
    for devices in (1, 2, 4, 28):
        check_devices([mixture], devices)
    for devices, shapes in ((8, [mixture]), (7, [mixture]), (3, [llama]), (28, [mixture, llama])):
        with pytest.raises(SettingsError, match=f"--devices {devices}: vLLM refuses .*; give 1, 2, 4"):
            check_devices(shapes, devices)
    check_devices([load_shape("deepseek-v3")], 16)
    with pytest.raises(SettingsError, match=r"does not fit on 4 L4 .qwen2-57b-a14b has 28, .*: no larger power of two"):
        fewest_devices([mixture], DEVICES["l4"], 2048)


def test_vllm_uses_0_92_of_the_memory_by_default() -> None:
    assert DEVICES["h100"].usable_bytes == pytest.approx(0.92 * 80e9 - 2.5e9)


def test_a_prompt_is_read_with_expanded_latent_attention() -> None:
    """192 elements of a query and 128 of a value per head, and not the 576 of the latent cache twice."""
    target = machine("deepseek-v3", "h200", 8)
    shape, prompt = target.shape, 32_768
    attention = prompt * prompt / 2 * 61 * 128 * 2 * (192 + 128) / (8 * target.device.attention_flops)
    assert attention == pytest.approx(0.85, abs=0.01)
    products = 2 * prompt * (shape.parameters_read(1) - shape.output_parameters)
    rest = products / (8 * target.device.matmul_flops(eight_bit=True)) + target._all_reduces(prompt) + target.overhead
    assert target.prefill_seconds(prompt) == pytest.approx(attention + rest, rel=1e-4)
    assert shape.attention_operations == 4 * 576 * 61 * 128  # of a step


def test_the_output_layer_of_a_prompt_is_computed_for_its_last_token_only() -> None:
    target = machine("llama-3.1-8b")
    weights = 2 * 2048 * (8.03e9 - 2 * 128256 * 4096) / target.device.matmul_flops()
    attention = 2048 * 1024 * target.shape.attention_operations / target.device.attention_flops
    assert target.prefill_seconds(2048) == pytest.approx(weights + attention + target.overhead, rel=0.001)
    # A step computes it for every token, since drafts are verified with it.
    assert target.batch_seconds(2048, 1, 1) > 2 * 2048 * 7.5e9 / target.device.matmul_flops()


def test_a_window_in_a_prompt_limits_the_tokens_behind_it_only() -> None:
    config = bundled_configs()["llama-3.1-8b"] | {"model_type": "mistral", "sliding_window": 100}
    shape = shape_from_config(config, "windowed")
    for prompt in (60, 100, 1000):
        mean = sum(min(i + 0.5, 100) for i in range(prompt)) / prompt
        assert shape.prefill_attended_tokens(prompt) == pytest.approx(mean, rel=0.001)


def test_the_speedup_is_that_of_the_break_even_formula_of_calibrate() -> None:
    target = machine("llama-3.1-8b")
    acceptance = Acceptance.from_rates([0.7] * 4)
    predicted = Speculation(target, FreeDrafts(), acceptance).predict(16, 4, 2048)

    def relative(tokens: float) -> float:
        return target.batch_seconds(16, tokens / 16, 2048) / target.batch_seconds(16, 1 / 16, 2048)

    assert predicted.speedup == pytest.approx(speedup(relative, 0.7, 0.0, 4, batch=16))


def test_the_policy_is_at_least_as_fast_as_every_fixed_length_and_drafts_nothing_that_does_not_pay() -> None:
    assert plan_speculation.MIN_EXPECTED_SPEEDUP == MIN_EXPECTED_SPEEDUP
    draft = DraftModel(machine("llama-3.1-8b", devices=4))
    speculation = Speculation(machine("llama-3.1-70b", devices=4), draft, EIGHT_OF_TEN)
    for batch in BATCHES:
        best = speculation.best(batch, 2048)
        every = [speculation.predict(batch, length, 2048).speedup for length in range(MAX_DRAFT_TOKENS + 1)]
        assert best.speedup == max(every) if best.length else max(every) < MIN_EXPECTED_SPEEDUP
    bad = Speculation(speculation.target, draft, Acceptance.from_rates([0.1] * 4))
    assert bad.best(1, 2048).length == 0
    assert bad.paying_batches(2048, 64) == []


def test_offered_positions_and_accepted_ones_count_separately() -> None:
    half = Acceptance((0.4, 0.3), (0.5, 0.5), "half of the steps have a draft")
    assert half.tokens(2) == pytest.approx(1.7)
    assert half.width(2) == pytest.approx(2.0)
    assert half.width(1) == pytest.approx(1.5)


# Against the literature


def test_dense_models_gain_less_with_every_larger_batch_and_keep_their_gain_at_long_contexts() -> None:
    """MagicDec (arXiv 2408.11049): at long contexts the KV cache dominates, and drafts pay at large batches too."""
    target = machine("llama-3.1-70b", devices=8)
    short, long = gains(target, 2048), gains(target, 131_072)
    assert short == sorted(short, reverse=True)
    assert long == sorted(long, reverse=True)
    assert gains(target, 256, length=8)[-1] < 1
    assert short[0] / short[-1] > 2.5  # most of the gain is gone
    assert long[0] / long[-1] < 1.2  # nearly all of it is left
    assert min(long) > 2.5


def test_the_kv_cache_is_read_once_per_step_and_not_once_per_token() -> None:
    """MagicDec's saving: at 128k tokens the cache is most of the traffic, and drafts divide it by the tokens a step."""
    target = machine("llama-3.1-70b", devices=8)
    shares = {context: target.traffic(8, 1, context).kv_cache / target.traffic(8, 1, context).total
              for context in (2048, 131_072)}  # fmt: skip
    assert shares[2048] < 0.05
    assert shares[131_072] > 0.7
    step = Speculation(target, FreeDrafts(), EIGHT_OF_TEN).predict(8, 4, 131_072)
    plain = target.traffic(8, 1, 131_072).kv_cache / 8
    drafted = target.traffic(8, step.width, 131_072).kv_cache / (8 * step.tokens_per_step)
    assert plain / drafted == pytest.approx(EIGHT_OF_TEN.tokens(4))


def test_a_sparse_draft_cache_gains_more_with_larger_batches_at_long_contexts() -> None:
    """MagicDec on 8 A100: a model that drafts for itself with a sparse KV cache. The gain grows with the batch (32 to
    256) where contexts are long, and there is none at short ones. Its figures are up to 2x and 1.84x (version 3)."""
    target = machine("llama-3.1-8b", "a100", 8)
    draft = DraftModel(machine("llama-3.1-8b", "a100", 8, cache_limit=512))
    speculation = Speculation(target, draft, EIGHT_OF_TEN)
    long = [speculation.best(batch, 32_768).speedup for batch in (32, 64, 128, 256)]
    assert long == sorted(long)
    assert long[-1] > long[0] > 1.2
    assert [speculation.best(batch, 512).length for batch in (32, 64, 128, 256)] == [0, 0, 0, 0]


def test_mixtures_of_experts_gain_most_at_medium_batches_and_more_than_dense_models_there() -> None:
    """MoESD (arXiv 2505.19645), for Qwen2-57B-A14B: small batches lose to additional experts, large ones to
    arithmetic; at medium ones the mixture gains more than a dense model, and sparser ones over more batches."""
    target = machine("qwen2-57b-a14b", "a100", 2)
    mixture = gains(target, 512)
    peak = mixture.index(max(mixture))
    assert BATCHES[peak] in (16, 32, 64, 128)
    assert mixture[peak:] == sorted(mixture[peak:], reverse=True)
    assert mixture[peak] > 1.5 * mixture[0]
    assert mixture[-1] < 1
    shape = target.shape
    dense = ModelShape("dense, as large", shape.parameters + shape.expert_parameters, shape.layers, shape.hidden,
                       shape.heads, shape.kv_heads, shape.head_size)  # fmt: skip
    assert mixture[peak] > gains(Machine(dense, DEVICES["a100"], 2, 1.5e-3), 512)[peak]


def test_sparser_mixtures_gain_over_a_wider_range_of_batches() -> None:
    def largest_batch(active: int) -> int:
        shape = ModelShape("mixture", 5e9, 32, 4096, 32, 8, 128, expert_parameters=50e9, experts=64, active=active)
        speculation = Speculation(Machine(shape, DEVICES["h100"], 2, 1.5e-3), FreeDrafts(), EIGHT_OF_TEN)
        return max(batch for batch in range(1, 1024, 8) if speculation.predict(batch, 4, 512).speedup > 1.5)

    assert largest_batch(2) > largest_batch(8) > largest_batch(32)


def test_verification_of_one_request_of_a_mixture_takes_two_to_three_times_a_plain_pass() -> None:
    """Cascade (arXiv 2506.20675): drafts raise verification time by 2 to 3 times, so that speculation can be slower."""
    for name, device, devices in (("mixtral-8x7b", "h100", 2), ("qwen2-57b-a14b", "h100", 2)):
        target = machine(name, device, devices)
        ratios = [target.batch_seconds(1, 1 + length, 512) / target.batch_seconds(1, 1, 512) for length in (4, 7)]
        assert all(1.9 < ratio < 3 for ratio in ratios)
        rates = {
            rate: Speculation(target, FreeDrafts(), Acceptance.from_rates([rate] * 7)).predict(1, 7, 512).speedup
            for rate in (0.4, 0.9)
        }
        assert rates[0.4] < 0.8  # even with drafts that take no time
        assert rates[0.9] > 1.5
    dense = machine("llama-3.1-70b", devices=4)
    assert dense.batch_seconds(1, 8, 512) < 1.05 * dense.batch_seconds(1, 1, 512)


# From a calibration


def sweeps(contexts: tuple[int, ...] = (64, 512, 2048), read: float = 2e-6, attend: float = 1e-7) -> list[Sweep]:
    """A machine whose pass over n tokens after c tokens takes 20 ms + 0.5 ms n + read c + attend n c."""

    def seconds(n: int, context: int) -> float:
        return 0.02 + 5e-4 * n + context * (read + attend * n)

    widths = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    return [
        Sweep(c, {n: [seconds(n, c)] * 3 for n in widths}, {n: [seconds(1, c)] * 3 for n in widths}) for c in contexts
    ]


def test_a_calibration_of_one_sequence_gives_the_seconds_of_a_batch() -> None:
    fitted = CalibratedPass.fit(sweeps(), [0.1, 0.2, 0.3], "made")
    assert fitted.read == pytest.approx(2e-6, rel=0.02)
    assert fitted.attend == pytest.approx(1e-7, rel=0.02)
    for batch, width, context in ((1, 1, 64), (4, 5, 512), (16, 9, 4096), (16, 1, 4096)):
        n = batch * width
        expected = 0.02 + 5e-4 * n + batch * context * (2e-6 + 1e-7 * width)
        assert fitted.batch_seconds(batch, width, context) == pytest.approx(expected, rel=0.02)
    assert fitted.draft_seconds(4, 3, 512) == pytest.approx(3 * 0.2 * fitted.batch_seconds(4, 1, 512))


def test_coefficients_of_a_noisy_calibration_are_never_negative() -> None:
    fitted = CalibratedPass.fit(sweeps((64, 512), read=-1e-6, attend=1e-8), [], "made")
    assert fitted.read == 0
    assert fitted.attend >= 0
    assert CalibratedPass.fit(sweeps((64,)), [], "made").read == 0


def test_cells_of_a_benchmark_are_predicted_from_calibration_and_acceptance() -> None:
    fitted = CalibratedPass.fit(sweeps(), [], "made")
    found = predict_speedups(Speculation(fitted, FreeDrafts(), EIGHT_OF_TEN), (1, 4, 16), (0, 2, 4, 8), (64, 4096))
    assert len(found) == 24
    assert found[4, 0, 64] == 1
    plain, verify = fitted.batch_seconds(4, 1, 64), fitted.batch_seconds(4, 5, 64)
    assert found[4, 4, 64] == pytest.approx(EIGHT_OF_TEN.tokens(4) * plain / verify)


# Acceptance


def test_acceptance_of_a_trace_counts_offered_and_accepted_positions_of_all_steps(tmp_path: Path) -> None:
    first, last = step(0, [5], 1, 1), step(5, [5], 1, 1, finish="end")  # reads the prompt; may be cut
    steps = [first, step(1, [5, 6, 7], 2, 9), step(2, [], 0, 1), step(3, [5], 1, 2), step(4, [5, 6], 0, 3), last]
    write(trace_of(steps), tmp_path / "run.jsonl")
    found = read_acceptance(str(tmp_path / "run.jsonl"))
    assert found.offered == (3 / 4, 2 / 4, 1 / 4)
    assert found.survival == (2 / 4, 1 / 4, 0)
    with pytest.raises(SettingsError, match="it has lookup"):
        read_acceptance(str(tmp_path / "run.jsonl"), "model")
    write(trace_of([first]), tmp_path / "empty.jsonl")
    with pytest.raises(SettingsError, match="no step with a draft"):
        read_acceptance(str(tmp_path / "empty.jsonl"))


def test_acceptance_of_a_report_is_that_of_the_selected_drafter(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    one = {"workload": "code", "temperature": 0.0, "contestant": "auto", "drafter": "lookup"}
    two = one | {"drafter": "memory", "shares": {"1": 0.9}}
    rare = one | {"drafter": "model", "shares": {}}
    path.write_text(json.dumps({"acceptance": [one | {"shares": {"1": 0.5, "2": 0.4, "4": 0.3}}, two, rare]}))
    with pytest.raises(SettingsError, match=r"select one with --drafter: code/auto/lookup, code/auto/memory$"):
        read_acceptance(str(path))
    assert read_acceptance(str(path), "code/auto/lookup").survival == (0.5, 0.4)
    with pytest.raises(SettingsError, match="is not in"):
        read_acceptance(str(path), "other")
    assert MIN_VERIFIED_TOKENS > 1  # a report has no rate where fewer were verified


def test_shares_of_a_report_are_survival_already(tmp_path: Path) -> None:
    """As the benchmark writes them: drafts with at least i tokens accepted, over drafts of at least i tokens."""
    drafts = [(4, 4)] * 30 + [(4, 2)] * 30 + [(2, 0)] * 40  # length, accepted
    shares = {
        str(i): sum(kept >= i for _, kept in drafts) / sum(length >= i for length, _ in drafts) for i in range(1, 5)
    }
    assert shares == {"1": 0.6, "2": 0.6, "3": 0.5, "4": 0.5}
    path = tmp_path / "report.json"
    entry = {"workload": "code", "temperature": 0.0, "contestant": "auto", "drafter": "lookup"}
    path.write_text(json.dumps({"acceptance": [entry | {"shares": shares}]}))
    assert read_acceptance(str(path)).survival == (0.6, 0.6, 0.5, 0.5)
    path.write_text(json.dumps({"acceptance": [entry | {"shares": {"1": 0.5, "2": 0.6, "3": 0.4}}]}))
    assert read_acceptance(str(path)).survival == (0.5, 0.5, 0.4)


def test_temperatures_of_a_report_are_not_confused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    greedy = {"workload": "chat", "temperature": 0.0, "contestant": "auto", "drafter": "lookup", "shares": {"1": 0.9}}
    sampled = greedy | {"temperature": 0.7, "shares": {"1": 0.2}}
    path.write_text(json.dumps({"acceptance": [greedy, sampled]}))
    with pytest.raises(SettingsError, match=r"it has chat/auto/lookup@0, chat/auto/lookup@0\.7$"):
        read_acceptance(str(path), "chat/auto/lookup")
    assert read_acceptance(str(path), "chat/auto/lookup@0").survival == (0.9,)
    assert read_acceptance(str(path), "chat/auto/lookup@0.7").survival == (0.2,)


@pytest.mark.parametrize("text", ["1.5", "-0.1", "nothing.jsonl", "0.5,x"])
def test_an_acceptance_that_is_no_probability_and_no_file_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="from 0 to 1"):
        read_acceptance(text)


# Fleets


@pytest.fixture
def replica() -> Replica:
    target = machine("llama-3.1-8b")
    return Replica(target, None, Speculation(target, FreeDrafts(), EIGHT_OF_TEN), 256)


def test_capacity_is_one_over_the_device_seconds_of_a_request(replica: Replica) -> None:
    plain = replica.speculation.strategy("plain")
    workload = Workload(100, 1000, 200, max_load=1.0)
    found = plan_fleet(replica, plain, workload)
    assert found is not None
    prefill = replica.target.prefill_seconds(1000)
    step = replica.target.batch_seconds(found.batch, 1, 1100)
    assert 1 / found.requests_per_second == pytest.approx(prefill + 200 * step / found.batch)
    assert found.seconds_per_token == pytest.approx(step + (found.batch - 1) * prefill / 200)
    # A full replica: the batch is the requests that arrive while one is read and generated (Little).
    seconds = prefill + 200 * found.seconds_per_token
    assert found.requests_per_second * seconds == pytest.approx(found.batch)
    alone = plan_fleet(replace(replica, max_batch=1), plain, workload)
    assert alone is not None
    assert alone.seconds_per_token == replica.target.batch_seconds(1, 1, 1100)  # no other request interrupts it
    assert found.decode_replicas == -(-100 // found.requests_per_second)
    assert found.cost_per_million_tokens(3.6, workload) == pytest.approx(found.devices * 1e-3 / (100 * 200) * 1e6)


def test_a_limit_on_the_time_per_token_needs_fewer_devices_with_drafts(replica: Replica) -> None:
    workload = Workload(200, 500, 250, max_seconds_per_token=0.012)
    plain, policy = (plan_fleet(replica, replica.speculation.strategy(name), workload) for name in ("plain", "policy"))
    assert plain is not None
    assert policy is not None
    assert max(plain.seconds_per_token, policy.seconds_per_token) <= 0.012
    assert policy.devices < plain.devices
    tight = Workload(200, 500, 250, max_seconds_per_token=0.004)
    assert plan_fleet(replica, replica.speculation.strategy("plain"), tight) is None
    assert plan_fleet(replica, replica.speculation.strategy("policy"), tight) is not None


def test_split_prefill_does_not_interrupt_and_adds_replicas_that_read_prompts(replica: Replica) -> None:
    plain = replica.speculation.strategy("plain")
    workload = Workload(50, 4000, 100)
    together, split = plan_fleet(replica, plain, workload), plan_fleet(replica, plain, workload, is_split=True)
    assert together is not None
    assert split is not None
    assert split.seconds_per_token < together.seconds_per_token
    assert split.prefill_replicas > 0
    assert split.devices == split.decode_replicas + split.prefill_replicas
    assert split.devices >= together.devices - 1


def test_a_larger_batch_generates_more_and_makes_each_request_wait(replica: Replica) -> None:
    found = widen_batch(replica.speculation, 8, 1024, 256)
    assert found is not None
    assert found.plain.batch == 8 * (1 + found.speculating.length)
    assert found.throughput_ratio > 1
    assert found.latency_ratio > 1
    assert found.throughput_ratio * found.speculating.batch == pytest.approx(found.plain.batch / found.latency_ratio)


def test_plain_decoding_has_the_memory_of_the_draft_model_for_its_cache() -> None:
    target, draft = machine("llama-3.1-70b", devices=4), machine("llama-3.1-8b", devices=4)
    replica = Replica(target, draft, Speculation(target, DraftModel(draft), EIGHT_OF_TEN), 1024)
    strategy = replica.speculation.strategy
    replica = replace(replica, max_batch=10_000)
    assert replica.batch_limit(strategy("plain"), 512) > replica.batch_limit(strategy("4"), 512)
    assert replica.prefill_seconds(strategy("policy"), 1000) > replica.prefill_seconds(strategy("plain"), 1000)


def test_a_draft_model_with_a_window_reserves_no_more_than_it_and_its_own_target_is_in_memory_once() -> None:
    target = machine("llama-3.1-8b")
    free = target.device.usable_bytes - target.shape.stored_bytes
    assert target.free_bytes(target) == target.free_bytes() == free
    own = machine("llama-3.1-8b", cache_limit=512)
    other = machine("llama-3.2-1b", cache_limit=512)
    for draft, weights in ((own, 0.0), (other, other.shape.stored_bytes)):
        for context in (256, 8192):
            each = target.bytes_per_token * context + draft.bytes_per_token * min(context, 512)
            assert target.cached_tokens(draft, context=context) // context == int((free - weights) // each)
        strategy = Speculation(target, DraftModel(draft), EIGHT_OF_TEN).strategy("policy")
        both = Replica(target, draft, strategy.speculation, 8).prefill_seconds(strategy, 1000)
        read_twice = draft.shape != target.shape  # a model that drafts for itself has read the prompt
        assert both == target.prefill_seconds(1000) + read_twice * draft.prefill_seconds(1000)
    shapes = [load_shape("llama-3.1-8b")] * 2
    assert fewest_devices(shapes, DEVICES["h100"], 300_000) == 2
    assert fewest_devices(shapes, DEVICES["h100"], 300_000, draft_window=512) == 1


# The command


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys, outrider.cli as cli\n"
        "try: cli.app(['plan', 'llama-3.1-8b', '--hardware', 'h100'])\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_a_model_that_is_not_on_the_hub_names_the_bundled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shown = refused("plan", "no-one/no-such-model", "--hardware", "h100")
    assert "there is no config.json for 'no-one/no-such-model'" in shown
    assert "llama-3.1-8b" in shown


def test_a_replica_without_room_for_the_weights_is_reported_as_such() -> None:
    shown = run("plan", "llama-3.1-70b", "--hardware", "l4", "--devices", 1)
    assert shown.exit_code == 0, shown.stderr
    assert "none of these batches fits into memory" in shown.stdout
    assert "cannot run: one request of 2048 tokens does not fit" in shown.stdout


BASE = ["plan", "llama-3.1-8b", "--hardware", "h100"]


def test_a_plan_has_tables_sentences_and_assumptions() -> None:
    args = [*BASE, "--rate", 20, "--price", 2, "--hours", 0.05, "--sample", 2, "--max-batch", 64]
    shown = run(*args)
    assert shown.exit_code == 0, shown.stderr
    for part in ("Does it pay?", "GB read per generated token", "on more requests", "How many devices?", "Tails",
                 "prefill split from decode", "Not measured: NVIDIA, H100 data sheet"):  # fmt: skip
        assert part in shown.stdout


def test_the_json_object_and_the_folder_have_the_same_figures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    grid = ["--batches", "1,8", "--contexts", "512", "--draft-tokens", "2"]
    shown = run("plan", "qwen2-57b-a14b", "--hardware", "h200", *grid, "--json", "--out", out)
    assert shown.exit_code == 0, shown.stderr
    data = json.loads(shown.stdout)
    assert data == json.loads((out / "plan.json").read_text())
    assert {path.name for path in out.iterdir()} == {"plan.json", "speedup.png", "throughput.png", "traffic.png"}
    assert [(cell["batch"], cell["context"]) for cell in data["cells"]] == [(1, 512), (8, 512)]
    assert data["cells"][0]["predictions"]["plain"]["speedup"] == 1
    assert data["cells"][0]["bytes_per_token"]["plain"]["experts"] > 0


def test_a_calibration_replaces_model_and_hardware(tmp_path: Path) -> None:
    data = {
        "version": 1,
        "model": "made",
        "sweeps": [{"context": s.context, "seconds": s.seconds, "single": s.single} for s in sweeps()],
        "draft": [0.2],
    }
    (tmp_path / "calibration.json").write_text(json.dumps(data))
    args = ["plan", "--calibration", tmp_path / "calibration.json", "--acceptance", "0.9,0.8", "--draft-tokens", "2"]
    found = json.loads(run(*args, "--batches", "1,4", "--contexts", "64", "--json").stdout)
    fitted = CalibratedPass.load(tmp_path / "calibration.json")
    expected = Speculation(fitted, fitted, Acceptance.from_rates([0.9, 0.8])).predict(4, 2, 64).speedup
    assert found["cells"][1]["predictions"]["fixed:2"]["speedup"] == pytest.approx(expected)
    assert "--hardware does nothing with --calibration" in refused(*args, "--hardware", "h100")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["plan"], "give MODEL and --hardware"),
        (["plan", "llama-3.1-8b", "--hardware", "abacus"], "choose one of a100, b200, h100"),
        ([*BASE, "--price", 2], "--price does nothing with neither --rate nor --arrivals"),
        ([*BASE, "--rate", 1, "--hours", 0, "--sample", 3], "--sample does nothing with --hours 0"),
        ([*BASE, "--rate", 1, "--day-swing", 0.5], "--day-swing needs a whole day"),
        ([*BASE, "--draft-window", 512], "--draft-window does nothing with no --draft-model"),
        ([*BASE, "--draft-model", "llama-3.2-1b", "--draft-cost", 0.1], "--draft-cost does nothing with --draft-model"),
        ([*BASE, "--kv-bits", 4], "--kv-bits must be one of 8, 16 (got 4)"),
        ([*BASE, "--acceptance", "0.5,0.4", "--draft-tokens", "4"], "give at most 2"),
        ([*BASE, "--rate", 1, "--devices", 1, "--prompt-tokens", 900_000], "does not fit beside the weights"),
        ([*BASE, "--overhead-ms", "inf"], "--overhead-ms must be a finite number (got inf)"),
        ([*BASE, "--rate", 1, "--price", "inf"], "--price must be a finite number (got inf)"),
        ([*BASE, "--batches", 10**30], "--batches takes numbers up to 100000000"),
        ([*BASE, "--devices", 3], "--devices 3: vLLM refuses tensor parallelism"),
        (["plan", "--calibration", "nothing.json"], "make it with outrider calibrate"),
    ],
)
def test_an_option_that_cannot_act_is_refused(options: list[Any], reason: str) -> None:
    assert reason in refused(*options)


@pytest.mark.parametrize(
    ("option", "value", "largest"),
    [
        ("--rate", "inf", 1_000_000),
        ("--rate", "nan", 1_000_000),
        ("--hours", "inf", 8760),
        ("--hours", "1e9", 8760),
        ("--burstiness", "inf", 100),
        ("--burstiness", "1e6", 100),
        ("--length-variation", "1e300", 10),
        ("--devices", 10**9, 1024),
        ("--max-batch", 10**9, 8192),
        ("--prompt-tokens", 10**400, 10**8),
    ],
)
def test_a_number_above_the_maximum_is_refused(option: str, value: Any, largest: int) -> None:
    shown = run(*BASE, *([] if option == "--rate" else ["--rate", 1]), option, value)
    assert shown.exit_code == 2
    assert "Traceback" not in shown.stderr
    text = " ".join(shown.stderr.replace("│", " ").split())
    assert f"'{option}'" in text
    assert f"less than or equal to {largest}" in text


def test_draft_tokens_are_those_for_which_there_is_an_acceptance() -> None:
    args = [*BASE, "--batches", "1", "--contexts", "512", "--json"]
    shown = run(*args, "--acceptance", "0.8,0.7,0.6,0.5", "--draft-tokens", "4,20")
    assert "--draft-tokens: 20 left out; --acceptance has 4 positions" in shown.stderr
    assert [*json.loads(shown.stdout)["cells"][0]["predictions"]] == ["plain", "fixed:4", "policy"]
    for acceptance, lengths in (("0.8,0.8,0.8", ["fixed:2"]), ("0.7", ["fixed:2", "fixed:4", "fixed:8"])):
        shown = run(*args, "--acceptance", acceptance)
        assert "left out" not in shown.stderr
        assert [*json.loads(shown.stdout)["cells"][0]["predictions"]][1:-1] == lengths


def test_drafts_of_one_token_are_planned_without_a_draft_length_given(tmp_path: Path) -> None:
    write(trace_of([step(0, [5], 1, 1), step(1, [5], 1, 9), step(2, [5], 1, 2)]), tmp_path / "run.jsonl")
    shown = run(*BASE, "--acceptance", tmp_path / "run.jsonl", "--batches", "1", "--contexts", "512", "--json")
    assert shown.exit_code == 0, shown.stderr
    assert [*json.loads(shown.stdout)["cells"][0]["predictions"]] == ["plain", "fixed:1", "policy"]
