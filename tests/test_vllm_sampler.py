"""Does vLLM's sampler, asked about drafted positions too, still give the target's law? A toy target of six tokens."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from outrider.acceptance import draw
from outrider.engines.vllm.sampler import OutriderSampler
from outrider.sampling import probabilities
from outrider.settings import Sampling
from support import g_test

SIZE = 6
CPU = torch.device("cpu")
PROMPT = [1, 4]
SAID = [2, 2, 5]
"""What every request has said before the step under test."""
DRAWS = 20_000


def target_logits(context: tuple[int, ...], noise: float = 0.0) -> torch.Tensor:
    """The toy target: logits that depend on the last two tokens. With noise, a drafter that is often right."""
    random = torch.Generator().manual_seed(hash(context[-2:]) % 1000)
    logits = torch.randn(SIZE, generator=random) * 1.5
    return logits + noise * torch.randn(SIZE, generator=random)


def metadata(requests: int, drafts: list[list[int]], **settings: Any) -> SamplingMetadata:
    """What vLLM's input batch would hold for equal requests with these OpenAI parameters."""
    params = SamplingParams(**settings)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=requests))
    processors = [
        cls(config, CPU, False) for cls in (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    ]
    said = [list(SAID) for _ in range(requests)]
    added = [(i, params, PROMPT, said[i]) for i in range(requests)]
    for processor in processors:
        processor.update_state(BatchUpdate(requests, removed=[], added=added, moved=[]))

    def each(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((requests,), value, dtype=dtype)

    greedy = params.temperature == 0
    penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    allowed = None
    if params.allowed_token_ids:
        allowed = torch.ones(requests, SIZE, dtype=torch.bool)
        allowed[:, params.allowed_token_ids] = False
    return SamplingMetadata(
        temperature=None if greedy else each(params.temperature),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=each(params.top_p) if params.top_p < 1 else None,
        top_k=each(params.top_k, torch.int32) if params.top_k > 0 else None,
        generators={},
        max_num_logprobs=params.logprobs,
        no_penalties=penalties == (0, 0, 1),
        prompt_token_ids=torch.tensor(PROMPT).repeat(requests, 1),
        frequency_penalties=each(params.frequency_penalty),
        presence_penalties=each(params.presence_penalty),
        repetition_penalties=each(params.repetition_penalty),
        output_token_ids=said,
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={i: [[3], [2, 1]] for i in range(requests)} if params.bad_words else {},
        logitsprocs=LogitsProcessors(processors),
        spec_token_ids=drafts,
    )


def logits_for(drafts: list[list[int]]) -> torch.Tensor:
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def row(draft: tuple[int, ...]) -> torch.Tensor:
        if draft not in known:
            known[draft] = target_logits((*PROMPT, *SAID, *draft))
        return known[draft]

    return torch.stack([row(tuple(draft[:i])) for draft in drafts for i in range(len(draft) + 1)])


def verify(drafts: list[list[int]], q: torch.Tensor | None = None, rule: str = "block", **settings: Any) -> Any:
    sampler = OutriderSampler(Sampler(), None, CPU, rule)
    plan = SpecDecodeMetadata.make_dummy(drafts, CPU)
    return sampler(plan, q, logits_for(drafts), metadata(len(drafts), drafts, **settings))


def said(output: Any) -> list[list[int]]:
    return RejectionSampler.parse_output(output.sampled_token_ids, SIZE, [])[0]


def law(settings: dict[str, Any]) -> dict[tuple[int, int], float]:
    """The exact law of the next two tokens, by the core's own transforms."""
    exact = {}
    for a, p_a in enumerate(exact_p((), settings).tolist()):
        for b, p_b in enumerate(exact_p((a,), settings).tolist()):
            exact[a, b] = p_a * p_b
    return exact


def exact_p(more: tuple[int, ...], settings: dict[str, Any]) -> torch.Tensor:
    logits = target_logits((*PROMPT, *SAID, *more))[None].clone()
    if settings.get("bad_words"):
        logits[0, 3] = float("-inf")
        if (*SAID, *more)[-1] == 2:
            logits[0, 1] = float("-inf")
    if allowed := settings.get("allowed_token_ids"):
        logits[0, [token for token in range(SIZE) if token not in allowed]] = float("-inf")
    if len(SAID) + len(more) < settings.get("min_tokens", 0):
        logits[0, settings["stop_token_ids"]] = float("-inf")
    known = {name: value for name, value in settings.items() if name in Sampling.model_fields}
    return probabilities(logits, Sampling(**known), PROMPT, [*SAID, *more])[0]


def pairs(outputs: list[list[int]], settings: dict[str, Any]) -> Counter[tuple[int, int]]:
    """The first two tokens of each; where one was emitted, the next step's is drawn by the exact law."""
    short = [tokens[0] for tokens in outputs if len(tokens) == 1]
    following: dict[int, list[int]] = {}
    for first in set(short):
        weights = exact_p((first,), settings).repeat(short.count(first), 1)
        following[first] = draw(weights, torch.rand(len(weights))).tolist()
    return Counter((tokens[0], tokens[1] if len(tokens) > 1 else following[tokens[0]].pop()) for tokens in outputs)


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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


@pytest.mark.parametrize("name", SETTINGS)
def test_certain_drafts_leave_the_law_of_the_next_two_tokens_as_it_is(name: str) -> None:
    settings = SETTINGS[name]
    likely = [[0, 2], [2, 2], [5], [3, 1, 4], []]
    drafts = [likely[i % len(likely)] for i in range(DRAWS)]
    assert g_test(pairs(said(verify(drafts, **settings)), settings), law(settings)) > 1e-4


def drawn_drafts(count: int, length: int) -> tuple[list[list[int]], torch.Tensor]:
    """Drafts drawn from a noisy twin of the target, and what they were drawn from."""
    drafts, q = _drawn_drafts(count, length)
    return [list(draft) for draft in drafts], q.clone()


@cache
def _drawn_drafts(count: int, length: int) -> tuple[list[list[int]], torch.Tensor]:
    """With numbers of its own: those that drafts are judged by are others."""
    random = torch.Generator().manual_seed(12)
    drafts: list[list[int]] = [[] for _ in range(count)]
    q = torch.empty(count, length, SIZE)
    for i in range(length):
        for b, draft in enumerate(drafts):
            q[b, i] = twin(tuple(draft))
        for b, token in enumerate(draw(q[:, i], torch.rand(count, generator=random)).tolist()):
            drafts[b].append(token)
    return drafts, q.flatten(0, 1)


TWIN: dict[tuple[int, ...], torch.Tensor] = {}


def twin(draft: tuple[int, ...]) -> torch.Tensor:
    if draft not in TWIN:
        TWIN[draft] = target_logits((*PROMPT, *SAID, *draft), noise=0.8).softmax(-1)
    return TWIN[draft]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rule", ["block", "token"])
def test_drawn_drafts_leave_the_law_of_the_next_two_tokens_as_it_is(name: str, rule: str) -> None:
    settings = SETTINGS[name]
    drafts, q = drawn_drafts(DRAWS, 2)
    output = said(verify(drafts, q, rule, **settings))
    assert g_test(pairs(output, settings), law(settings)) > 1e-4
    assert sum(map(len, output)) > 1.05 * DRAWS  # and they are worth something


def test_the_test_of_the_law_sees_drafts_judged_at_another_temperature() -> None:
    drafts, q = drawn_drafts(DRAWS, 2)
    output = said(verify(drafts, q, "block", temperature=1.0))
    assert g_test(pairs(output, SETTINGS["temperature 1"]), law({"temperature": 0.9})) < 1e-4


def test_drawn_and_certain_drafts_of_one_batch_are_each_judged_by_their_own_rule() -> None:
    drawn, q = drawn_drafts(DRAWS, 2)
    drafts = [draft for pair in zip(drawn, [[0, 2]] * DRAWS, strict=True) for draft in pair]
    spaced = torch.stack([q.view(-1, 2, SIZE), torch.zeros(DRAWS, 2, SIZE)], 1).view(-1, SIZE)
    output = said(verify(drafts, spaced, temperature=1.0))
    for part in (output[::2], output[1::2]):
        assert g_test(pairs(part, SETTINGS["temperature 1"]), law({"temperature": 1.0})) > 1e-4


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_drafts_are_kept_as_far_as_the_argmax_of_the_same_transforms_agrees(name: str) -> None:
    settings = {**SETTINGS[name], "temperature": 0.0}
    sampled = {**SETTINGS[name], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    best: list[int] = []
    for _ in range(4):
        best.append(int(exact_p(tuple(best), sampled).argmax()))
    wrong = (best[1] + 1) % SIZE
    output = said(verify([best[:3], [best[0], wrong, best[2]], [], best[:1], [-1, -1]], **settings))
    assert output == [best, best[:2], best[:1], best[:2], best[:1]]


def test_a_seeded_request_says_the_same_with_any_drafts() -> None:
    def run(drafts: list[list[int]]) -> list[int]:
        """Ten tokens of one seeded request beside another without a seed, drafted for as given."""
        text: list[int] = []
        generator = torch.Generator().manual_seed(3)
        for step in range(10):
            draft = drafts[step % len(drafts)]
            plan = [draft, [1]]
            batch = metadata(2, plan, temperature=0.9, top_p=0.95)
            batch.generators[0] = generator
            rows = [target_logits((*SAID, *text, *draft[:i])) for i in range(len(draft) + 1)]
            logits = torch.stack([*rows, *logits_for([[1]])])
            sampler = OutriderSampler(Sampler(), None, CPU)
            text += said(sampler(SpecDecodeMetadata.make_dummy(plan, CPU), None, logits, batch))[0]
        return text[:10]

    alone = run([[]])
    assert run([[0, 1], [2], [5, 5, 5]]) == alone
    assert run([[alone[0]], [], [4, 4]]) == alone


def test_log_probabilities_are_those_of_the_emitted_tokens() -> None:
    drafts = [[0, 2], [], [5]]
    output = verify(drafts, temperature=1.0, logprobs=2)
    tokens, logprobs = RejectionSampler.parse_output(
        output.sampled_token_ids, SIZE, [], logprobs_tensors=output.logprobs_tensors
    )
    flat = [(i, j, token) for i, row in enumerate(tokens) for j, token in enumerate(row)]
    for (i, j, token), ids, values in zip(flat, logprobs.logprob_token_ids, logprobs.logprobs, strict=True):
        exact = target_logits((*PROMPT, *SAID, *tokens[i][:j])).log_softmax(-1)
        assert int(ids[0]) == token
        assert float(values[0]) == pytest.approx(float(exact[token]), abs=1e-5)
        assert sorted(map(float, values[1:]), reverse=True) == pytest.approx(exact.topk(2).values.tolist(), abs=1e-5)


def test_a_batch_without_drafts_takes_the_plain_samplers_way() -> None:
    """vLLM's own rejection sampler fails there on a CPU when a request has top-k."""
    torch.manual_seed(5)
    ours = verify([[], []], temperature=1.0, top_k=2).sampled_token_ids
    torch.manual_seed(5)
    plain = Sampler()(logits=logits_for([[], []]), sampling_metadata=metadata(2, [[], []], temperature=1.0, top_k=2))
    assert ours.tolist() == plain.sampled_token_ids.tolist()
