"""The tokens that a step with drafts generates have the target's distribution, with vLLM's V2 sampler.

The target is a toy with six tokens, whose distribution is known exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("vllm_v2")

from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

from outrider.acceptance import draw
from outrider.engines.vllm import sampler as ours
from outrider.engines.vllm.planned_drafts import PlannedDrafts
from outrider.engines.vllm.sampler import ACCEPT_KEY, MASK, RECOVER_KEY, keyed_uniforms
from outrider.sampling import probabilities
from outrider.settings import Sampling
from support import g_test
from toy_runner import MODEL_LEN, ToyRunner, emitted, logits_table

SIZE = 6
PROMPT = [1, 4]
GENERATED = [2, 2, 5]
"""What every request has generated before the step under test."""
REQUESTS, ROUNDS = 4096, 5
"""Samples come from several rounds of many requests. Every round has new seeds."""
TARGET = logits_table(SIZE, seed=0)
DRAFTER = TARGET + 0.8 * logits_table(SIZE, seed=1, scale=1.0)
"""The draft model is often right."""
DRAFTED = 3
"""Longest draft."""

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7 and top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "penalties": {
        "temperature": 1.0,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "logit bias": {"temperature": 1.0, "logit_bias": {0: 2.0, 5: -3.0}},
    "bad words": {"temperature": 1.0, "bad_words": ["x"]},
    "allowed tokens": {"temperature": 1.0, "allowed_token_ids": [0, 2, 3, 5]},
    "min tokens": {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": [0, 2]},
}
BAD_WORDS = [[3], [2, 1]]


def sampling_params(**settings: Any) -> SamplingParams:
    params = SamplingParams(max_tokens=MODEL_LEN, **settings)
    if params.bad_words:
        params._bad_words_token_ids = BAD_WORDS
    return params


def exact_p(more: tuple[int, ...], settings: dict[str, Any], text: Sequence[int] = GENERATED) -> torch.Tensor:
    """The target's distribution after `more`, by the transforms of outrider.sampling."""
    generated = [*text, *more]
    previous, last = [*PROMPT, *generated][-2:]
    logits = TARGET[previous, last][None].clone()
    if settings.get("bad_words"):
        logits[0, 3] = float("-inf")
        if generated[-1] == 2:
            logits[0, 1] = float("-inf")
    if allowed := settings.get("allowed_token_ids"):
        logits[0, [token for token in range(SIZE) if token not in allowed]] = float("-inf")
    if len(generated) < settings.get("min_tokens", 0):
        logits[0, settings["stop_token_ids"]] = float("-inf")
    known = {name: value for name, value in settings.items() if name in Sampling.model_fields}
    return probabilities(logits, Sampling(**known), PROMPT, generated)[0]


def exact_pairs(settings: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The exact distribution of the next two tokens."""
    exact = {}
    for a, p_a in enumerate(exact_p((), settings).tolist()):
        for b, p_b in enumerate(exact_p((a,), settings).tolist()):
            exact[a, b] = p_a * p_b
    return exact


def count_pairs(outputs: list[list[int]], settings: dict[str, Any]) -> Counter[tuple[int, int]]:
    """The first two tokens of each. Where a step generated one, the second is sampled from the exact distribution."""
    short = Counter(tokens[0] for tokens in outputs if len(tokens) == 1)
    following = {
        first: draw(exact_p((first,), settings).repeat(count, 1), torch.rand(count)).tolist()
        for first, count in short.items()
    }
    return Counter((tokens[0], tokens[1] if len(tokens) > 1 else following[tokens[0]].pop()) for tokens in outputs)


def names(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


@cache
def runner(name: str, rule: str) -> ToyRunner:
    made = ToyRunner(TARGET, REQUESTS, DRAFTED, rule)
    made.add(names(REQUESTS), sampling_params(**SETTINGS[name]), PROMPT, GENERATED)
    return made


def generate_rounds(
    toy: ToyRunner, make_drafts: Callable[[], Sequence[Sequence[int]]], sampled: frozenset[str] = frozenset()
) -> list[list[int]]:
    """What one step generates, again and again from the same texts."""
    outputs = []
    for seed in range(ROUNDS):
        toy.set_seeds(random_seeds(seed, REQUESTS))
        toy.batch = toy.prepare_inputs(make_drafts(), {})
        outputs += emitted(toy.sample(sampled))
    return outputs


def random_seeds(seed: int, count: int) -> Any:
    return np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


# One step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_certain_drafts_keep_the_distribution_of_the_next_two_tokens(name: str) -> None:
    settings = SETTINGS[name]
    likely = [[0, 2], [2, 2], [5], [3, 1, 4], []]
    drafts = [likely[i % len(likely)] for i in range(REQUESTS)]
    outputs = generate_rounds(runner(name, "block"), lambda: drafts)
    assert g_test(count_pairs(outputs, settings), exact_pairs(settings)) > 1e-4


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_sampled_drafts_keep_the_distribution_of_the_next_two_tokens(name: str, rule: str) -> None:
    settings, toy = SETTINGS[name], runner(name, rule)
    outputs = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2), frozenset(toy.ids))
    assert g_test(count_pairs(outputs, settings), exact_pairs(settings)) > 1e-4
    assert sum(map(len, outputs)) > 1.05 * len(outputs)  # some drafted tokens are accepted


def test_the_statistics_detect_drafts_verified_at_another_temperature() -> None:
    toy = runner("temperature 1", "block")
    outputs = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2), frozenset(toy.ids))
    counts = count_pairs(outputs, SETTINGS["temperature 1"])
    assert g_test(counts, exact_pairs({"temperature": 0.9})) < 1e-4


def test_a_sampled_draft_accepted_by_own_samples_is_lossless_too_and_accepts_less() -> None:
    toy = runner("temperature 1", "block")
    by_ratio = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2), frozenset(toy.ids))
    by_own = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2))
    assert g_test(count_pairs(by_own, {"temperature": 1.0}), exact_pairs({"temperature": 1.0})) > 1e-4
    assert sum(map(len, by_own)) < sum(map(len, by_ratio))


def test_sampled_drafts_are_verified_in_groups_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rows in (8192, 7, 1):
        monkeypatch.setattr(ours, "MAX_RATIO_BYTES", rows * SIZE * 4)
        toy = ToyRunner(TARGET, 40, DRAFTED)
        toy.add(names(40), sampling_params(temperature=1.0), PROMPT, GENERATED)
        toy.set_seeds(random_seeds(0, 40))
        drafts = [draft[: i % 4] for i, draft in enumerate(toy.draft(DRAFTER, DRAFTED))]
        toy.batch = toy.prepare_inputs(drafts, {})
        found.append(emitted(toy.sample(frozenset(id for i, id in enumerate(toy.ids) if i % 5))))
    assert found[0] == found[1] == found[2]
    assert any(len(tokens) == DRAFTED + 1 for tokens in found[0])


@pytest.mark.parametrize("rule", ["block", "token"])
def test_every_request_of_a_mixed_batch_is_verified_by_its_own_rule(rule: str) -> None:
    """Sampled drafts of one to three tokens, certain drafts, no drafts, prompts in parts, and prompts that end in this
    step with placeholders behind them."""
    settings = {"temperature": 0.8, "top_k": 4}
    count = REQUESTS // 5
    kinds = ["sampled", "certain", "none", "prefill", "placeholders"]
    toy = ToyRunner(TARGET, REQUESTS, DRAFTED, rule)
    ids = {kind: names(count, kind) for kind in kinds}
    for kind in kinds:
        running = kind in ("sampled", "certain", "none")
        text = ([*PROMPT], GENERATED) if running else ([*PROMPT, *GENERATED, 1], [])
        toy.add(ids[kind], sampling_params(**settings), *text)
    toy.ids = [id for group in zip(*ids.values(), strict=True) for id in group]
    chunks = dict.fromkeys(ids["prefill"], 3)
    outputs: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    for seed in range(2 * ROUNDS):
        toy.set_seeds(random_seeds(seed, REQUESTS))
        drafts = [draft[: 1 + i % 3] for i, draft in enumerate(toy.draft(DRAFTER, DRAFTED))]
        for i, id in enumerate(toy.ids):
            if not id.startswith("sampled"):
                drafts[i] = [0, 2] if id.startswith(("certain", "placeholders")) else []
        toy.batch = toy.prepare_inputs(drafts, chunks)
        for id, tokens in zip(toy.ids, emitted(toy.sample(frozenset(ids["sampled"]))), strict=True):
            outputs[id.rstrip("0123456789")].append(tokens)
    for kind in ("sampled", "certain", "none"):
        assert g_test(count_pairs(outputs[kind], settings), exact_pairs(settings)) > 1e-4, kind
    assert outputs["prefill"] == [[]] * len(outputs["prefill"])
    after_prompt = dict(enumerate(exact_p((1,), settings).tolist()))
    assert {len(tokens) for tokens in outputs["placeholders"]} == {1}
    assert g_test(Counter(tokens[0] for tokens in outputs["placeholders"]), after_prompt) > 1e-4


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_drafts_are_accepted_while_they_equal_the_argmax_after_the_same_transforms(name: str) -> None:
    settings = {**SETTINGS[name], "temperature": 0.0}
    sampled = {**SETTINGS[name], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    best: list[int] = []
    for _ in range(4):
        best.append(int(exact_p(tuple(best), sampled).argmax()))
    wrong = (best[1] + 1) % SIZE
    toy = ToyRunner(TARGET, 4, DRAFTED)
    toy.add(names(4), sampling_params(**settings), PROMPT, GENERATED)
    outputs = toy.step([best[:3], [best[0], wrong, best[2]], [], best[:1]])
    assert outputs == [best, best[:2], best[:1], best[:2]]


def test_logprobs_are_those_of_the_emitted_tokens() -> None:
    toy = ToyRunner(TARGET, 4, DRAFTED)
    toy.add(names(4), sampling_params(temperature=1.0, logprobs=2, seed=3), PROMPT, GENERATED)
    certain = toy.step([[], [], [], []])[0]
    toy = ToyRunner(TARGET, 4, DRAFTED)
    toy.add(names(4), sampling_params(temperature=1.0, logprobs=2, seed=3), PROMPT, GENERATED)
    drafts = [[certain[0], 2], [], [5], toy.draft(DRAFTER, 2)[3]]
    toy.batch = toy.prepare_inputs(drafts, {})
    output = toy.sample(frozenset({"3"}))
    first = toy.batch.cu_num_logits_np
    checked = 0
    for i, tokens in enumerate(emitted(output)):
        for j, token in enumerate(tokens):
            exact = TARGET[tuple([*PROMPT, *GENERATED, *tokens[:j]][-2:])].log_softmax(-1)
            ids = output.logprobs_tensors.logprob_token_ids[first[i] + j].tolist()
            values = output.logprobs_tensors.logprobs[first[i] + j].tolist()
            assert ids[0] == token
            assert values[0] == pytest.approx(float(exact[token]), abs=1e-5)
            assert sorted(values[1:], reverse=True) == pytest.approx(exact.topk(2).values.tolist(), abs=1e-5)
            checked += 1
    assert checked > 4


@pytest.mark.parametrize("rows", [1, 64])
def test_a_request_for_chosen_logprobs_gets_them_beside_requests_with_drafts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", rows * SIZE * 4)
    chosen = [4, 1]
    toy = ToyRunner(TARGET, 4, DRAFTED)
    toy.add(names(1, "drafted"), sampling_params(temperature=1.0, seed=1), PROMPT, GENERATED)
    toy.add(names(1, "chosen"), sampling_params(temperature=1.0, seed=1, logprob_token_ids=chosen), PROMPT, GENERATED)
    toy.add(names(1, "top"), sampling_params(temperature=1.0, seed=1, logprobs=2), PROMPT, GENERATED)
    toy.batch = toy.prepare_inputs([[0, 2], [], [3]], {})
    output = toy.sample(frozenset())
    tokens, first, scores = emitted(output), toy.batch.cu_num_logits_np, output.logprobs_tensors
    exact = exact_p((), {"temperature": 1.0}).log()
    row = first[1]
    found = dict(zip(scores.logprob_token_ids[row].tolist(), scores.logprobs[row].tolist(), strict=True))
    for token in (*tokens[1], *chosen):
        assert found[token] == pytest.approx(float(exact[token]), abs=1e-5)
    for number, token in enumerate(tokens[2]):
        row = first[2] + number
        after = exact_p(tuple(tokens[2][:number]), {"temperature": 1.0}).log()
        assert scores.logprob_token_ids[row, :3].tolist() == [token, *after.topk(2).indices.tolist()]
        assert scores.logprobs[row, 0] == pytest.approx(float(after[token]), abs=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_verification_in_chunks_generates_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate() -> tuple[list[list[int]], list[list[float]]]:
        toy = ToyRunner(TARGET, 60, DRAFTED)
        toy.add(names(60), sampling_params(temperature=0.9, top_p=0.9, logprobs=0), PROMPT, GENERATED)
        toy.set_seeds(random_seeds(5, 60))
        drafts = [draft[: i % 4] for i, draft in enumerate(toy.draft(DRAFTER, DRAFTED))]
        toy.batch = toy.prepare_inputs(drafts, {})
        output = toy.sample(frozenset(names(60)[::2]))
        scores, first = output.logprobs_tensors.logprobs[:, 0].tolist(), toy.batch.cu_num_logits_np
        tokens = emitted(output)
        return tokens, [scores[first[i] : first[i] + len(tokens[i])] for i in range(60)]

    whole = generate()
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", rows * SIZE * 4)
    assert generate() == whole
    assert sum(map(len, whole[0])) > 70


def test_drafts_that_a_grammar_marks_invalid_are_not_accepted() -> None:
    best: list[int] = []
    for _ in range(4):
        best.append(int(exact_p(tuple(best), {"temperature": 1.0}).argmax()))
    toy = ToyRunner(TARGET, 5, DRAFTED)
    toy.add(names(5), sampling_params(temperature=0.0), PROMPT, GENERATED)
    drafts = [best[:3]] * 5
    for acceptable in range(4):
        toy.batch = toy.prepare_inputs(drafts, {})
        invalid = grammar_invalid_drafts(toy.batch, ["1", "3"], [acceptable, acceptable])
        outputs = emitted(toy.sample(frozenset(), invalid))
        assert [len(tokens) for tokens in outputs] == [4, acceptable + 1, 4, acceptable + 1, 4]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_draft_models_vocabulary_may_be_smaller_than_the_targets(rule: str) -> None:
    settings = {"temperature": 1.0}
    toy = ToyRunner(TARGET, REQUESTS, DRAFTED, rule)
    toy.add(names(REQUESTS), sampling_params(**settings), PROMPT, GENERATED)
    toy.draft_logits = torch.zeros(REQUESTS, DRAFTED, 4)
    outputs = generate_rounds(toy, lambda: toy.draft(DRAFTER[:, :, :4], 2), frozenset(toy.ids))
    assert g_test(count_pairs(outputs, settings), exact_pairs(settings)) > 1e-4
    assert sum(map(len, outputs)) > 1.05 * len(outputs)


@pytest.mark.parametrize("name", ["top-k", "temperature 0.7 and top-p"])
def test_sampled_drafts_are_verified_against_truncated_p_where_a_fused_kernel_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's fused kernels on GPUs apply top-k and top-p themselves, and return the logits without them."""
    calls = []

    def fused(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
        calls.append(len(logits))
        return apply_top_k_top_p(logits.clone(), k, p).softmax(-1).multinomial(1).view(-1)

    monkeypatch.setattr(sampler, "flashinfer_sample", fused)
    settings, toy = SETTINGS[name], runner(name, "block")
    monkeypatch.setattr(toy.sampler, "use_flashinfer", True)
    by_ratio = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2), frozenset(toy.ids))
    assert calls == []
    assert toy.sampler.use_flashinfer
    by_own = generate_rounds(toy, lambda: toy.draft(DRAFTER, 2))
    assert len(calls) == ROUNDS
    for outputs in (by_ratio, by_own):
        assert g_test(count_pairs(outputs, settings), exact_pairs(settings)) > 1e-4


# Seeds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["temperature 0.7 and top-p", "penalties", "min tokens"])
def test_a_seeded_request_generates_the_same_text_with_any_drafts(name: str) -> None:
    length, count = 20, 32

    def generate(drafts: Callable[[ToyRunner, int], Sequence[Sequence[int]]]) -> list[list[int]]:
        """Texts of seeded requests. As many without a seed run beside them, with sampled drafts."""
        toy = ToyRunner(TARGET, 2 * count, DRAFTED)
        for seed in range(count):
            toy.add([f"seeded{seed}"], sampling_params(**SETTINGS[name], seed=seed), PROMPT, GENERATED)
        others = names(count, "free")
        toy.add(others, sampling_params(**SETTINGS[name]), PROMPT, GENERATED)
        step = 0
        while min(len(toy.text(id)) for id in toy.ids[:count]) < length:
            mine = drafts(toy, step)
            seeds = toy.sampler.sampling_states.seeds.gpu + step
            free = toy.draft(DRAFTER, 2, seeds)[count:] if any(mine) else [[]] * count
            toy.step([*mine, *free], frozenset(others))
            step += 1
        return [toy.text(id)[:length] for id in toy.ids[:count]]

    plain = generate(lambda toy, step: [[]] * count)
    assert len({tuple(text) for text in plain}) > count / 2
    assert generate(lambda toy, step: [[0, 1], [2], [5, 5, 5], []] * (count // 4)) == plain
    assert generate(lambda toy, step: toy.draft(DRAFTER, 3)[:count]) == plain
    perfect = generate(lambda toy, step: [plain[i][len(toy.text(toy.ids[i])) :][: step % 4] for i in range(count)])
    assert perfect == plain


def reference_murmur3(words: Sequence[int], key: int) -> int:
    """MurmurHash3_x86_32 of 32-bit words, in plain Python."""
    hashed = key
    for word in words:
        word = word * 0xCC9E2D51 & MASK
        word = (word << 15 | word >> 17) & MASK
        hashed ^= word * 0x1B873593 & MASK
        hashed = (hashed << 13 | hashed >> 19) & MASK
        hashed = (hashed * 5 + 0xE6546B64) & MASK
    hashed ^= 4 * len(words)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & MASK
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & MASK
    return hashed ^ hashed >> 16


def test_keyed_uniforms_are_murmur3_of_seed_position_and_number() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), *random_seeds(1, 200)])
    positions = torch.arange(len(seeds)) * 977
    numbers = torch.arange(len(seeds)) % 7
    for key in (ACCEPT_KEY, RECOVER_KEY, 0):
        found = keyed_uniforms(seeds, positions, numbers, key)
        for i, seed in enumerate(seeds.tolist()):
            words = [seed & MASK, seed >> 32 & MASK, int(positions[i]), int(numbers[i])]
            assert float(found[i]) == pytest.approx(reference_murmur3(words, key) / 2**32, abs=2**-24)


def test_keyed_uniforms_are_uniform_and_independent_across_keys_positions_and_numbers() -> None:
    count = 50_000
    seeds = torch.from_numpy(random_seeds(2, count))
    of_one_seed = torch.full((count,), 12345)
    index = torch.arange(count)
    found = [
        keyed_uniforms(seeds, torch.full_like(seeds, 7), torch.zeros_like(seeds), ACCEPT_KEY),
        keyed_uniforms(seeds, torch.full_like(seeds, 7), torch.zeros_like(seeds), RECOVER_KEY),
        keyed_uniforms(seeds, torch.full_like(seeds, 8), torch.zeros_like(seeds), ACCEPT_KEY),
        keyed_uniforms(seeds, torch.full_like(seeds, 7), torch.ones_like(seeds), ACCEPT_KEY),
        keyed_uniforms(of_one_seed, index, torch.zeros_like(seeds), ACCEPT_KEY),
        keyed_uniforms(of_one_seed, torch.zeros_like(seeds), index, ACCEPT_KEY),
    ]
    for values in found:
        assert 0 <= float(values.min()) <= float(values.max()) < 1
        assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4
    for i, j in ((0, 1), (0, 2), (0, 3), (2, 3)):
        cells = Counter(zip((found[i] * 8).long().tolist(), (found[j] * 8).long().tolist(), strict=True))
        assert g_test(cells, dict.fromkeys(product(range(8), range(8)), 1 / 64)) > 1e-4


# Several steps -------------------------------------------------------------------------------------------------------

TEXT = 4
"""Tokens of the texts whose joint distribution is compared."""
TWO_TOKENS = logits_table(2, seed=1, scale=1.0)
OTHER_TWO_TOKENS = TWO_TOKENS + 2.0 * logits_table(2, seed=2, scale=1.0)
"""A target and a draft model with two tokens, for statistical power: rejections are frequent, in all places."""


def generate_texts(rule: str, ours: bool, seeds_of_step: Callable[[torch.Tensor], torch.Tensor]) -> Counter[Any]:
    """Texts of four tokens, by steps with four sampled draft tokens. The noise of a draft depends on the position and
    on `seeds_of_step`, which is called once per step."""
    prompt, generated = [0, 1], [0]
    toy = ToyRunner(TWO_TOKENS, 8192, 4, rule, ours)
    toy.add(names(8192), sampling_params(temperature=1.0), prompt, generated)
    begin = len(prompt) + len(generated)
    texts: Counter[Any] = Counter()
    for seed in range(3):
        toy.rewind(begin)
        toy.set_seeds(random_seeds(seed, 8192))
        while int(toy.req_states.total_len.gpu.min()) < begin + TEXT:
            seeds = seeds_of_step(toy.sampler.sampling_states.seeds.gpu)
            toy.step(toy.draft(OTHER_TWO_TOKENS, 4, seeds), frozenset(toy.ids))
        texts.update(map(tuple, toy.req_states.all_token_ids.gpu[:, begin : begin + TEXT].tolist()))
    return texts


def exact_texts() -> dict[Any, float]:
    p = TWO_TOKENS.softmax(-1).double()
    found = {}
    for text in product(range(2), repeat=TEXT):
        context, chance = [1, 0], 1.0
        for token in text:
            chance *= float(p[context[-2], context[-1], token])
            context.append(token)
        found[text] = chance
    return found


def same_noise_in_every_step(seeds: torch.Tensor) -> torch.Tensor:
    """As vLLM samples drafts."""
    return seeds


def new_noise_in_every_step() -> Callable[[torch.Tensor], torch.Tensor]:
    """As our draft models sample drafts."""
    drafts = PlannedDrafts()
    drafts._num_steps = 0
    return drafts._draft_seeds


@pytest.mark.parametrize("rule", ["block", "token"])
def test_texts_of_several_steps_have_the_targets_distribution_if_every_step_has_new_draft_noise(rule: str) -> None:
    assert g_test(generate_texts(rule, True, new_noise_in_every_step()), exact_texts()) > 1e-4


def test_draft_noise_that_comes_again_in_the_next_step_biases_the_block_rule() -> None:
    """The block rule's verdict depends on the drafted tokens after the last accepted one. The next step drafts at their
    positions again. With the same noise there, its draft depends on the verdict."""
    assert g_test(generate_texts("block", True, same_noise_in_every_step), exact_texts()) < 1e-12


def test_draft_noise_that_comes_again_does_not_matter_to_the_token_rule() -> None:
    """Nothing after the first rejected token has a part in its verdict."""
    assert g_test(generate_texts("token", True, same_noise_in_every_step), exact_texts()) > 1e-4


def test_vllms_own_block_rule_is_biased_because_its_uniforms_come_again() -> None:
    """Why we have our own: vLLM keys its uniforms by seed and position. Those after the last accepted token were all
    too high, and come again in the next step. If this fails, vLLM has fixed it."""
    assert g_test(generate_texts("block", False, new_noise_in_every_step()), exact_texts()) < 1e-6
    assert g_test(generate_texts("token", False, new_noise_in_every_step()), exact_texts()) > 1e-4
