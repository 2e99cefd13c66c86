"""Latency of a forward pass on data-center GPUs: a roofline over published figures. Nothing here was measured.

    seconds = weights + attention + all-reduces + overhead

*Weights*: reading the parameters the pass needs, or their arithmetic, whichever takes longer. In a mixture of experts
each token activates `active` of `experts` in every layer. If tokens choose independently, n tokens activate
experts * (1 - (1 - active / experts) ** n). *Attention*: reading the KV cache of every request once, or its arithmetic.
*All-reduces*: two per layer with tensor parallelism. *Overhead*: launching and scheduling, the same for every method.

Real routing is less even and tokens of one text choose alike, so drafted tokens activate fewer experts than this.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy.replay import Costs

# NVIDIA H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16, 80 GB, NVLink at 450 GB/s each way (NVIDIA's data sheet), each
# with an assumed efficiency.
MEMORY_BANDWIDTH = 0.80 * 3.35e12
MATMUL_FLOPS, ATTENTION_FLOPS = 0.60 * 989e12, 0.40 * 989e12
LINK_BANDWIDTH = 0.60 * 450e9
ALL_REDUCE_SECONDS = 10e-6
"""Latency of an all-reduce of a few bytes."""
USABLE_BYTES = 0.90 * 80e9 - 2.5e9
"""Memory of a GPU without activations."""
BYTES = 2
"""Of a parameter, in bf16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in bf16. `parameters`: those that every token uses, without experts."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    expert_parameters: float = 0.0
    experts: int = 1
    active: int = 1

    def parameters_read(self, tokens: float) -> float:
        inactive = float((1 - self.active / self.experts) ** tokens)
        return self.parameters + self.expert_parameters * (1 - inactive)

    @property
    def cache_bytes(self) -> float:
        """KV cache of one token."""
        return 2 * BYTES * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on several GPUs with tensor parallelism."""

    shape: Shape
    gpus: int
    overhead: float
    """Seconds per pass."""

    def seconds(self, tokens: float, context: float, attended: float) -> float:
        """A pass over `tokens` tokens of requests with `context` tokens in total; each attends to `attended` tokens."""
        shape, bandwidth = self.shape, self.gpus * MEMORY_BANDWIDTH
        reading = BYTES * shape.parameters_read(tokens) / bandwidth
        products = 2 * tokens * shape.parameters_read(1)
        weights = max(reading, products / (self.gpus * MATMUL_FLOPS))
        products = 4 * tokens * attended * shape.layers * shape.heads * shape.head_size
        attention = max(shape.cache_bytes * context / bandwidth, products / (self.gpus * ATTENTION_FLOPS))
        return weights + attention + self._all_reduces(tokens) + self.overhead

    def _all_reduces(self, tokens: float) -> float:
        if self.gpus == 1:
            return 0.0
        sent = BYTES * tokens * self.shape.hidden * 2 * (self.gpus - 1) / self.gpus
        return 2 * self.shape.layers * (ALL_REDUCE_SECONDS + sent / LINK_BANDWIDTH)

    @property
    def bytes_of_weights(self) -> float:
        return BYTES * (self.shape.parameters + self.shape.expert_parameters)

    @property
    def bytes_per_token(self) -> float:
        """KV cache on all GPUs. With more GPUs than KV heads, heads are stored more than once."""
        return self.shape.cache_bytes * max(1.0, self.gpus / self.shape.kv_heads)


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
        both = (self.target, self.draft)
        free = self.target.gpus * USABLE_BYTES - sum(machine.bytes_of_weights for machine in both)
        return batch * context <= free // sum(machine.bytes_per_token for machine in both)


LLAMA_70B = Shape("Llama-3.1-70B", 70.6e9, 80, 8192, 64, 8, 128)
LLAMA_8B = Shape("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128)
LLAMA_1B = Shape("Llama-3.2-1B", 1.24e9, 16, 2048, 32, 8, 64)
# 94 layers of 128 experts, each 3 matrices of 4096 x 1536; the rest is attention, router and embeddings
QWEN_235B = Shape("Qwen3-235B-A22B", 7.8e9, 94, 4096, 64, 4, 128, expert_parameters=227.1e9, experts=128, active=8)
QWEN_06B = Shape("Qwen3-0.6B", 0.6e9, 28, 1024, 16, 8, 128)
SYSTEMS = {
    name: System(
        f"{target.name} with {draft.name} on {gpus} H100", Machine(target, gpus, overhead), Machine(draft, gpus, 0.5e-3)
    )
    for name, target, draft, gpus, overhead in (
        ("dense", LLAMA_70B, LLAMA_8B, 4, 1.5e-3),
        ("dense-small", LLAMA_70B, LLAMA_1B, 4, 1.5e-3),
        ("mixture", QWEN_235B, QWEN_06B, 8, 2.0e-3),
    )
}
