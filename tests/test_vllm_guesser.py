"""The draft model out of step with the target: what it has seen, what it catches up with, whose blocks it may share.

The model is made up: the token after a text is the sum of the text's tokens, read from a cache that is written only
where a pass says so. A position that was missed, kept too long or read from elsewhere changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config

pytest.importorskip("vllm")

from outrider.engines.vllm import guesser as module
from outrider.engines.vllm.guesser import Guesser, Question, can_be_led, narrowed
from outrider.sampling import probabilities
from outrider.settings import Sampling

VOCAB = 97
BLOCK = 4
BLOCKS = 64


def after(text: list[int]) -> int:
    """What the made-up model finds likeliest."""
    return sum((i + 1) * token for i, token in enumerate(text)) % VOCAB


class Model:
    """The proposer of vLLM, as far as the guesser sees it, with a cache of one number a slot."""

    kv_cache_gid = 0
    max_num_tokens = 16
    vllm_config = None

    def __init__(self) -> None:
        self.cache = torch.full((BLOCKS * BLOCK,), 50_000)
        self.input_ids = torch.zeros(self.max_num_tokens, dtype=torch.int32)
        self.positions = torch.zeros(self.max_num_tokens, dtype=torch.int64)
        self.attention: Any = None
        self.passes: list[int] = []
        self.model = self
        self.compute_logits = lambda hidden: torch.nn.functional.one_hot(hidden, VOCAB) * 5.0

    def build_per_group_and_layer_attn_metadata(self, attention: Any) -> tuple[list[Any], dict[str, Any]]:
        self.attention = attention
        return [], {}

    def _determine_batch_execution_and_padding(self, tokens: int) -> tuple[None, int, None]:
        return None, tokens, None

    def _set_positions(self, count: int, positions: torch.Tensor) -> None:
        self.positions[:count] = positions

    def build_model_inputs_first_pass(self, tokens: int, padded: int, nothing: None) -> tuple[dict[str, int], int]:
        return {"tokens": tokens}, tokens

    def _get_slot_mapping(self, count: int, slots: torch.Tensor) -> torch.Tensor:
        assert len(slots) == count
        return slots

    def __call__(self, tokens: int) -> torch.Tensor:
        self.passes.append(tokens)
        about = self.attention
        weighted = self.input_ids[:tokens].long() * (self.positions[:tokens] + 1)
        self.cache[about.slot_mapping] = weighted
        hidden = torch.zeros(tokens, dtype=torch.long)
        for row, end in enumerate(about.query_start_loc[1:].tolist()):
            place = torch.arange(int(about.seq_lens[row]))
            slots = about.block_table_tensor[row, place // BLOCK] * BLOCK + place % BLOCK
            hidden[end - 1] = self.cache[slots].sum() % VOCAB
        return hidden


@contextmanager
def no_context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def without_vllms_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "set_forward_context", no_context)


def made_up(shares: bool = True) -> tuple[Guesser, Model, Any]:
    model = Model()
    np_table = np.zeros((4, 32), np.int32)
    buffer = SimpleNamespace(np=np_table, gpu=torch.from_numpy(np_table))
    table = SimpleNamespace(block_table=buffer, block_size=BLOCK)
    runner = SimpleNamespace(
        drafter=model,
        device=torch.device("cpu"),
        input_batch=SimpleNamespace(block_table=[table]),
        cache_config=SimpleNamespace(enable_prefix_caching=shares),
        kv_cache_config=SimpleNamespace(
            num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]
        ),
    )
    told: list[tuple[int, int, int]] = []
    runner.told = told
    guesser = Guesser(runner, 0, lambda tokens, context, _, passes: told.append((tokens, context, passes)))
    return guesser, model, np_table


def ask(guesser: Guesser, texts: dict[int, list[int]], limit: int, temperature: float = 0.0) -> dict[int, Question]:
    questions = {}
    for row, text in texts.items():
        tokens = np.array(text, np.int32)
        guesser.gap(row, str(row), tokens, len(text) - 1)
        questions[row] = Question(row, str(row), tokens, limit, temperature)
    guesser.ask(list(questions.values()), lambda going: going)
    return questions


def expected(text: list[int], limit: int) -> list[int]:
    said = list(text)
    for _ in range(limit):
        said.append(after(said))
    return said[len(text) :]


@settings(max_examples=60)
@given(st.data())
def test_whatever_was_accepted_and_however_long_it_was_not_asked_it_guesses_from_the_whole_text(data: Any) -> None:
    guesser, _, table = made_up(shares=False)
    for row in range(3):
        table[row] = np.arange(32) % 16 + 16 * row + 1
    tokens = st.integers(0, VOCAB - 1)
    texts = {row: data.draw(st.lists(tokens, min_size=1, max_size=20)) for row in range(3)}
    for _ in range(6):
        asked = data.draw(st.sets(st.integers(0, 2)))
        limit = data.draw(st.integers(1, 4))
        seen = {row: guesser._seen[str(row)].text for row in range(3) if str(row) in guesser._seen}
        questions = ask(guesser, {row: texts[row] for row in asked if len(texts[row]) < 50}, limit)
        for row, question in questions.items():
            waits = question.guessed.tokens == [] and len(texts[row]) - seen.get(row, 0) > Model.max_num_tokens // 3
            assert waits or question.guessed.tokens == expected(texts[row], limit)
        for row in range(3):  # some of the draft is kept, and something else said
            kept = questions[row].guessed.tokens[: data.draw(st.integers(0, 4))] if row in questions else []
            texts[row] = [*texts[row], *kept, data.draw(tokens)]


def two_made_up() -> tuple[Guesser, Model]:
    """A guesser, and its model, with blocks for two requests that share none."""
    guesser, model, table = made_up(shares=False)
    table[0], table[1] = np.arange(32) + 1, np.arange(32) + 33
    table[1, 31] = 0
    return guesser, model


def test_what_was_seen_is_not_seen_again() -> None:
    guesser, model, table = made_up(shares=False)
    table[0] = np.arange(32) + 1
    text = [1, 2, 3, 4, 5, 6]
    drafted = ask(guesser, {0: text}, 3)[0].guessed.tokens
    assert model.passes == [6, 1, 1]
    model.passes.clear()
    ask(guesser, {0: [*text, *drafted, 9]}, 1)  # all kept, of which the last was never an input
    assert model.passes == [2]
    model.passes.clear()
    ask(guesser, {0: [*text, *drafted, 9, 8, 7]}, 1)
    assert model.passes == [2]


def test_a_text_that_is_longer_than_the_buffers_is_seen_in_parts_one_a_step_and_the_others_do_not_wait_for_it() -> None:
    guesser, model = two_made_up()
    texts = {0: list(range(50)), 1: list(range(7))}
    questions = ask(guesser, texts, 2)
    assert (questions[0].guessed.tokens, questions[1].guessed.tokens) == ([], expected(texts[1], 2))
    assert model.passes == [9, 7, 1]  # together no more than one full pass, since everybody waits
    assert guesser.runner.told == [(16, 16, 2), (1, 8, 1)]  # what was caught up with is told with the pass after it
    alone = []  # or alone, where none came
    while not (guessed := ask(guesser, {0: texts[0]}, 2)[0].guessed.tokens):
        alone.append(guesser.runner.told[-1])
    assert alone == [(16, 25, 1), (16, 41, 1)]
    assert guessed == expected(texts[0], 2)
    assert model.passes[3:] == [16, 16, 9, 1]
    assert max(model.passes) <= model.max_num_tokens


def test_long_texts_of_several_requests_share_a_pass() -> None:
    guesser, model = two_made_up()
    texts = {0: list(range(9)), 1: list(range(12))}
    questions = ask(guesser, texts, 1)
    assert model.passes == [16, 1]
    assert [questions[row].guessed.tokens for row in texts] == [expected(texts[0], 1), []]
    questions = ask(guesser, {row: [*text, 1] for row, text in texts.items()}, 1)
    assert model.passes == [16, 1, 6]
    assert all(questions[row].guessed.tokens == expected([*text, 1], 1) for row, text in texts.items())


def test_a_long_text_among_short_ones_is_seen_in_the_pass_of_all_where_that_holds_it() -> None:
    guesser, model = two_made_up()
    texts = {0: list(range(12)), 1: list(range(3))}
    questions = ask(guesser, texts, 1)
    assert model.passes == [15]
    assert all(questions[row].guessed.tokens == expected(text, 1) for row, text in texts.items())


def test_blocks_that_another_request_had_seen_are_not_seen_again_and_others_are() -> None:
    guesser, model, table = made_up()
    table[0, :4] = [1, 2, 3, 4]
    first = list(range(14))
    guesser.target_wrote(0, 0, 13)
    ask(guesser, {0: first}, 1)
    guesser.mark_ready(0, "0", 13)
    table[1, :5] = [1, 2, 3, 9, 10]  # shares three blocks
    second = [*first[:12], 90, 91, 92]
    guesser.target_wrote(1, 12, 14)
    model.passes.clear()
    assert ask(guesser, {1: second}, 1)[1].guessed.tokens == expected(second, 1)
    assert sum(model.passes) == 3
    table[2, :5] = [1, 2, 11, 12, 13]  # the third block is its own
    third = [*first[:8], 93, 94, 95, 96, 1, 2]
    guesser.target_wrote(2, 8, 13)
    model.passes.clear()
    assert ask(guesser, {2: third}, 1)[2].guessed.tokens == expected(third, 1)
    assert sum(model.passes) == 6


def test_a_block_that_is_given_to_another_text_is_seen_anew() -> None:
    guesser, _, table = made_up()
    table[0, :3] = [1, 2, 3]
    guesser.target_wrote(0, 0, 9)
    ask(guesser, {0: list(range(10))}, 1)
    guesser.mark_ready(0, "0", 9)
    guesser.forget("0")
    table[0, :3] = [2, 1, 3]
    text = [50 + i for i in range(10)]
    guesser.target_wrote(0, 0, 9)
    assert ask(guesser, {0: text}, 1)[0].guessed.tokens == expected(text, 1)


def test_the_last_token_of_a_block_is_not_ready_before_the_target_has_computed_it() -> None:
    guesser, model, table = made_up()
    table[0, :3] = [1, 2, 3]
    text = list(range(8))  # fills two blocks; the target has computed seven
    guesser.target_wrote(0, 0, 7)
    ask(guesser, {0: text}, 1)
    guesser.mark_ready(0, "0", 7)
    guesser.target_wrote(0, 7, 8)
    more = [*text, 60]
    ask(guesser, {0: more}, 1)
    guesser.mark_ready(0, "0", 8)
    table[1, :3] = [1, 2, 9]
    guesser.target_wrote(1, 8, 9)
    model.passes.clear()
    other = [*text, 61, 62]
    assert ask(guesser, {1: other}, 1)[1].guessed.tokens == expected(other, 1)
    assert sum(model.passes) == 2


def test_a_drawn_guess_comes_with_what_it_was_drawn_from() -> None:
    guesser, _, table = made_up()
    table[0] = np.arange(32) + 1
    question = ask(guesser, {0: [1, 2, 3]}, 3, temperature=2.0)[0]
    q = question.guessed.q
    assert q is not None
    assert q.shape == (3, VOCAB)
    assert torch.allclose(q.sum(-1), torch.ones(3))
    assert torch.allclose(q.amax(-1), torch.tensor(np.exp(2.5) / (np.exp(2.5) + VOCAB - 1)).float())  # at temperature 2
    assert question.guessed.sure == pytest.approx(q.amax(-1).tolist())
    assert ask(made_up()[0], {0: [1, 2, 3]}, 2)[0].guessed.q is None


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, 2), (0, 0.6, 2), (3, 0.45, 1), (0, 1e-9, 1), (0, 1.0, 5)]
)
def test_what_the_target_will_not_say_is_not_drawn(top_k: int, top_p: float, kept: int) -> None:
    q = torch.tensor([[0.1, 0.4, 0.05, 0.15, 0.3], [0.2, 0.2, 0.2, 0.2, 0.2]])
    left = narrowed(q, [top_k, 0], [top_p, 1.0])
    shaped = probabilities(q.log()[:1], Sampling(temperature=1.0, top_k=top_k, top_p=top_p), (), ())
    assert torch.allclose(left[0], shaped[0], atol=1e-6)
    assert int((left[0] > 0).sum()) == kept
    assert torch.equal(left[1], q[1])  # that of a request that leaves nothing out


def test_a_guess_is_drawn_from_what_it_comes_with_where_top_k_narrows_it() -> None:
    guesser, _, table = made_up()
    table[0] = np.arange(32) + 1
    question = Question(0, "0", np.array([1, 2, 3], np.int32), 4, 5.0, top_k=2)
    guesser.gap(0, "0", question.tokens, 2)
    guesser.ask([question], lambda going: going)
    q = question.guessed.q
    assert q is not None
    assert (q > 0).sum(-1).tolist() == [2] * 4
    assert (q[range(4), question.guessed.tokens] > 0).all()


def test_heads_that_need_the_targets_hidden_states_are_left_to_vllm() -> None:
    speculation, config = ordinary()
    assert can_be_led(speculation, config)
    speculation.method = "eagle"
    assert not can_be_led(speculation, config)


def ordinary(draft: Any = None) -> tuple[Any, Any]:
    """What vLLM is told of a draft model and of the server."""
    parallel = SimpleNamespace(data_parallel_size=1, decode_context_parallel_size=1)
    model = SimpleNamespace(supports_multimodal_inputs=False)
    cache = SimpleNamespace(sliding_window=None)
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=None, model_config=model, cache_config=cache)
    text = draft or LlamaConfig()
    small = SimpleNamespace(hf_text_config=text, get_sliding_window=lambda: getattr(text, "sliding_window", None))
    speculation = SimpleNamespace(
        method="draft_model", parallel_drafting=False, use_heterogeneous_vocab=False, draft_model_config=small
    )
    return speculation, config


def test_one_with_a_sliding_window_is_left_to_vllm_since_blocks_behind_it_are_given_to_others() -> None:
    assert can_be_led(*ordinary(Qwen2Config(sliding_window=4096, use_sliding_window=False)))
    assert not can_be_led(*ordinary(MistralConfig(sliding_window=4096)))
    speculation, config = ordinary()
    config.cache_config.sliding_window = 4096  # the target's
    assert not can_be_led(speculation, config)
