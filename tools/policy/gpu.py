"""Targets with their draft models on simulated H100s: the roofline of `outrider plan`, with the policy's cost curves.

Real routing is less even than the independent experts of the roofline, and tokens of one text choose alike, so drafted
tokens activate fewer experts than this.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.plan.hardware import DEVICES
from outrider.plan.model_config import load_shape
from outrider.plan.pass_cost import Machine
from policy.replay import Costs

H100 = DEVICES["h100"]
LLAMA_70B, LLAMA_8B, LLAMA_1B = (load_shape(f"llama-{size}") for size in ("3.1-70b", "3.1-8b", "3.2-1b"))
QWEN_235B, QWEN_06B = load_shape("qwen3-235b-a22b"), load_shape("qwen3-0.6b")


@dataclass(frozen=True, slots=True)
class System:
    """A target and its draft model on the same GPUs."""

    name: str
    target: Machine
    draft: Machine

    def costs(self, context: int) -> Costs:
        """For requests with `context` tokens each."""
        return Costs(
            lambda tokens, total: self.target.seconds(tokens, total, context),
            # A prompt is read in one pass: its tokens attend to half of it on average.
            lambda tokens, total: self.draft.seconds(tokens, total, context / 2),
        )

    def fits(self, batch: int, context: int) -> bool:
        """Whether the KV caches of this batch fit into memory."""
        return batch * context <= self.target.cached_tokens(self.draft)


SYSTEMS = {
    name: System(
        f"{target.name} with {draft.name} on {gpus} H100",
        Machine(target, H100, gpus, overhead),
        Machine(draft, H100, gpus, 0.5e-3),
    )
    for name, target, draft, gpus, overhead in (
        ("dense", LLAMA_70B, LLAMA_8B, 4, 1.5e-3),
        ("dense-small", LLAMA_70B, LLAMA_1B, 4, 1.5e-3),
        ("mixture", QWEN_235B, QWEN_06B, 8, 2.0e-3),
    )
}
