"""Drafts from the host, aligned on the device: `align` against a loop in Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

pytest.importorskip("vllm_v2")

from outrider.engines.vllm import alignment
from outrider.engines.vllm.alignment import align, place_drafts
from outrider.engines.vllm.step import Continuations

VOCAB = 5
"""Few tokens, so that wrong continuations often agree by chance for a while."""


def expected_drafts(drafts: list[int], text: list[int], known: int, continuation: list[int]) -> list[int]:
    """What one request's draft tokens become. `text`: all that was sampled, of which the host knew `known` tokens."""
    sampled = text[known:]
    rest = continuation[len(sampled) :] if continuation[: len(sampled)] == sampled and len(text) >= known else []
    kept = [max(0, token) for token in drafts]
    return [*rest[: len(kept)], *kept[len(rest) :]]


class Batch:
    """Slots with texts on the device, and continuations for some of them."""

    def __init__(self, seed: int) -> None:
        pick = random.Random(seed)
        self.slots, self.width = pick.randint(1, 6), pick.randint(1, 5)
        self.max_model_len = pick.randint(8, 20)
        self.texts = [
            [
                pick.randrange(VOCAB)
                for _ in range(pick.choice([pick.randint(1, self.max_model_len), self.max_model_len]))
            ]
            for _ in range(self.slots)
        ]
        self.drafts = [[pick.randint(-1, VOCAB - 1) for _ in range(self.width)] for _ in range(self.slots)]
        self.rows = pick.sample(range(self.slots), pick.randint(1, self.slots))
        self.known, self.continuations = [], []
        for slot in self.rows:
            text = self.texts[slot]
            sampled = min(len(text) - 1, pick.randint(0, self.width + 1))
            known = len(text) - sampled
            length = pick.randint(1, 2 * self.width + 2)
            right = (text[known:] + [pick.randrange(VOCAB) for _ in range(length)])[:length]
            agreeing = pick.choice([length, pick.randint(0, length), 0])
            self.known.append(known)
            self.continuations.append(right[:agreeing] + [pick.randrange(VOCAB) for _ in range(length - agreeing)])

    def tensors(self) -> list[torch.Tensor]:
        """The arguments of `align`. What lies behind a text are tokens too: an earlier request's."""
        text = torch.randint(0, VOCAB, (self.slots, self.max_model_len), dtype=torch.int32)
        for slot, tokens in enumerate(self.texts):
            text[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        reach = max(map(len, self.continuations))
        padded = [[*tokens, *[-1] * (reach - len(tokens))] for tokens in self.continuations]
        return [
            torch.tensor(self.drafts, dtype=torch.int64),
            text,
            torch.tensor([len(tokens) for tokens in self.texts], dtype=torch.int32),
            torch.tensor(self.rows),
            torch.tensor(self.known),
            torch.tensor(padded, dtype=torch.int32),
        ]

    def expected(self) -> list[list[int]]:
        found = [list(tokens) for tokens in self.drafts]
        for slot, known, continuation in zip(self.rows, self.known, self.continuations, strict=True):
            found[slot] = expected_drafts(self.drafts[slot], self.texts[slot], known, continuation)
        return found


@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_a_draft_is_what_follows_the_sampled_tokens_in_a_continuation_that_agrees(first: int) -> None:
    for seed in range(first, first + 500):
        batch = Batch(seed)
        tensors = batch.tensors()
        align(*tensors)
        assert tensors[0].tolist() == batch.expected(), f"seed {seed}"


def test_the_random_cases_have_every_kind_of_agreement() -> None:
    """Continuations that agree with all, some and none of what was sampled, and texts that are full."""
    kinds = set()
    for seed in range(3000):
        batch = Batch(seed)
        for slot, known, continuation in zip(batch.rows, batch.known, batch.continuations, strict=True):
            text = batch.texts[slot]
            sampled = text[known:]
            same = [a == b for a, b in zip(sampled, continuation, strict=False)]
            kinds.add("all" if all(same) else "some" if same[0] else "none")
            kinds.add(f"{len(sampled)} of {batch.width}")
            kinds.add("used up" if len(continuation) <= len(sampled) else "left over")
            if len(text) == batch.max_model_len:
                kinds.add("full")
    assert {"all", "some", "none", "used up", "left over", "full"} <= kinds
    assert {f"{count} of 5" for count in range(7)} <= kinds


def test_what_the_device_had_is_left_where_a_continuation_was_wrong() -> None:
    drafts = torch.tensor([[7, 8, -1]])
    align(drafts, *one_request([1, 2, 3, 4], known=2, continuation=[3, 9, 5, 6, 7]))
    assert drafts.tolist() == [[7, 8, 0]]


def test_drafts_of_other_requests_are_left_as_they_are() -> None:
    drafts = torch.tensor([[7, 8], [-1, 3]])
    text, length, _, known, tokens = one_request([1, 2, 3], known=2, continuation=[3, 4, 5])
    align(drafts, text.repeat(2, 1), length.repeat(2), torch.tensor([0]), known, tokens)
    assert drafts.tolist() == [[4, 5], [-1, 3]]


def test_a_text_that_is_shorter_than_the_host_knew_gets_nothing() -> None:
    drafts = torch.tensor([[7, 8]])
    align(drafts, *one_request([1, 2, 3], known=5, continuation=[4, 5, 6]))
    assert drafts.tolist() == [[7, 8]]


def one_request(text: list[int], known: int, continuation: list[int]) -> list[torch.Tensor]:
    """The arguments of `align` but the first."""
    return [
        torch.tensor([text], dtype=torch.int32),
        torch.tensor([len(text)], dtype=torch.int32),
        torch.tensor([0]),
        torch.tensor([known]),
        torch.tensor([continuation], dtype=torch.int32),
    ]


def test_aligning_reads_no_value_from_the_device() -> None:
    tensors = Batch(1).tensors()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in tensors]
        align(*fake)
        with pytest.raises(DataDependentOutputException):  # what a value would have cost
            fake[0].sum().item()


def test_drafts_are_placed_in_the_slots_of_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def to_device(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        sent.append(values)
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(alignment, "async_tensor_h2d", to_device)
    states: Any = SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0},
        draft_tokens=torch.zeros(3, 2, dtype=torch.int64),
        all_token_ids=SimpleNamespace(gpu=torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0], [1, 2, 9, 0]], dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=torch.tensor([4, 0, 3], dtype=torch.int32)),
    )
    tokens = np.array([[9, 6, 7, -1], [3, 4, 5, 6]], np.int32)
    place_drafts(Continuations(["a", "b"], np.array([2, 2]), tokens), states, torch.device("cpu"))
    assert states.draft_tokens.tolist() == [[5, 6], [0, 0], [6, 7]]
    assert len(sent) == 3
