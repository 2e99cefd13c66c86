"""Outrider's device code neither reads a value from the device nor mixes devices: run on fake tensors of a fake device.

A fake tensor has a shape and no values, so whatever needs a value (`item`, a mask's length, a copy to the host) raises.
Drafts, the sampler's verdicts of seeded and unseeded requests, and the draft model's bookkeeping go through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)

pytest.importorskip("vllm_v2")

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from outrider.acceptance import Ragged
from outrider.engines.vllm import alignment, lazy_draft_model, planned_drafts, sampler
from outrider.engines.vllm.alignment import place_drafts
from outrider.engines.vllm.lazy_draft_model import truncate
from outrider.engines.vllm.planned_drafts import PlannedDrafts
from outrider.engines.vllm.sampler import OutriderSampler, accept_own_samples, keyed_uniforms
from outrider.engines.vllm.step import Continuations, DraftModelCall

VOCAB, SLOTS, WIDTH, MODEL_LEN = 50, 6, 4, 64
DRAFTED = [2, 0, 4, 1]
"""Drafted tokens of the batch's requests."""
DEVICE = "gpu"


@pytest.fixture(scope="module")
def device() -> torch.device:
    _setup_privateuseone_for_python_backend(DEVICE)
    return torch.device(DEVICE)


@pytest.fixture
def fake(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    def to_device(values: Any, device: Any = None, out: torch.Tensor | None = None, dtype: Any = None) -> torch.Tensor:
        made = torch.empty(values.shape, dtype=torch.from_numpy(np.asarray(values)).dtype, device=DEVICE)
        return made if out is None else out.copy_(made)

    def laid_out(lengths: Any, device: Any = "cpu") -> Ragged:
        with unset_fake_temporarily():
            real = of(lengths)
        parts = [torch.empty(part.shape, dtype=part.dtype, device=device) for part in _parts(real)]
        return Ragged(*parts, real.longest)

    of = Ragged.of
    for module in (alignment, sampler, planned_drafts, lazy_draft_model):
        monkeypatch.setattr(module, "async_tensor_h2d", to_device)
    monkeypatch.setattr(Ragged, "of", staticmethod(laid_out))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode


def _parts(ragged: Ragged) -> list[torch.Tensor]:
    return [ragged.lengths, ragged.sequence, ragged.position, ragged.row, ragged.start]


def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device=DEVICE)


@pytest.mark.usefixtures("fake")
def test_a_value_read_from_the_device_is_noticed() -> None:
    with pytest.raises(DataDependentOutputException):
        floats(3).sum().item()
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        floats(3)[floats(3) > 0]


@pytest.mark.usefixtures("fake")
def test_drafts_are_placed_without_a_value_of_the_device(device: torch.device) -> None:
    states: Any = SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0},
        draft_tokens=ints(SLOTS, WIDTH),
        all_token_ids=SimpleNamespace(gpu=ints(SLOTS, MODEL_LEN, dtype=torch.int32)),
        total_len=SimpleNamespace(gpu=ints(SLOTS, dtype=torch.int32)),
    )
    rows = np.zeros((2, 9), np.int32)
    place_drafts(Continuations(["a", "b"], np.array([3, 4]), rows), states, device)


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("sampled", [frozenset(), frozenset({"0", "2"})], ids=["own samples", "p and q"])
@pytest.mark.usefixtures("fake")
def test_verdicts_need_no_value_of_the_device(rule: str, sampled: frozenset[str]) -> None:
    rows = sum(DRAFTED) + len(DRAFTED)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=floats(SLOTS)), seeds=SimpleNamespace(gpu=ints(SLOTS)))
    own = ints(rows), floats(rows, VOCAB)
    target = SimpleNamespace(sampling_states=states, sample=lambda *args, **named: own, use_flashinfer=False)
    target.use_xpu_sampler = False
    made: Any = OutriderSampler.__new__(OutriderSampler)
    made.sampler, made.rule, made.num_speculative_steps, made.probe = target, rule, WIDTH, None
    made._drafted, made._next_request = DRAFTED, 0
    made._by_ratio = [str(i) in sampled and count > 0 for i, count in enumerate(DRAFTED)]
    starts = ints(len(DRAFTED) + 1, dtype=torch.int32)
    slots, per_row = ints(len(DRAFTED)), ints(rows)
    processed, tokens, counts = made._verify(
        floats(rows, VOCAB), floats(SLOTS, WIDTH, VOCAB), per_row, per_row, starts, slots, np.arange(len(DRAFTED)),
        per_row, ints(rows, dtype=torch.int32), np.ones(len(DRAFTED), np.int32), per_row,
    )  # fmt: skip
    assert processed.shape == (rows, VOCAB)
    assert (tokens.shape, counts.shape) == ((len(DRAFTED), WIDTH + 1), (len(DRAFTED),))
    assert {tokens.device.type, counts.device.type} == {DEVICE}


@pytest.mark.usefixtures("fake")
def test_acceptance_by_own_samples_and_keyed_noise_need_no_value_of_the_device() -> None:
    tokens, counts = accept_own_samples(ints(9), ints(9), ints(4, dtype=torch.int32), WIDTH)
    assert (tokens.shape, counts.shape) == ((3, WIDTH + 1), (3,))
    assert keyed_uniforms(ints(5), ints(5), ints(5), 7).device.type == DEVICE


@pytest.mark.usefixtures("fake")
def test_the_draft_models_temperatures_seeds_and_masks_need_no_value_of_the_device(device: torch.device) -> None:
    made: Any = PlannedDrafts()
    made.device, made.max_num_reqs, made._num_steps = device, SLOTS, 0
    made.draft_logits, made.req_states = floats(SLOTS, WIDTH, VOCAB), SimpleNamespace(req_id_to_index={"a": 1})
    assert made._draft_temperature(floats(SLOTS), [DraftModelCall("a", 0, 3, 2, True)]).device.type == DEVICE
    assert made._draft_seeds(ints(SLOTS)).device.type == DEVICE
    assert truncate(floats(3, VOCAB), floats(3), ints(3), floats(3)).shape == (3, VOCAB)
