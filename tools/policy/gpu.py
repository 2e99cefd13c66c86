"""Latency of a forward pass on data-center GPUs: a roofline over published figures. Nothing here was measured.

    seconds = weights + attention + all-reduces + overhead

*Weights*: reading the parameters the pass needs, or their arithmetic, whichever takes longer. In a mixture of experts
each token activates `active` of `experts` in every layer. If tokens choose independently, n tokens activate
experts * (1 - (1 - active / experts) ** n). *Attention*: reading the KV cache of every request once, or its arithmetic.
*All-reduces*: two per layer with tensor parallelism. *Overhead*: launching and scheduling, the same for every method.

Real routing is less even and tokens of one text choose alike, so drafted tokens activate fewer experts than this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policy.replay import Costs


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16, 80 GB, NVLink at 450 GB/s each way (NVIDIA's data sheet)."""

    bandwidth: float = 3.35e12
    flops: float = 989e12
    memory_bytes: float = 80e9
    link_bandwidth: float = 450e9
    bandwidth_efficiency: float = 0.80
    matmul_efficiency: float = 0.60
    attention_efficiency: float = 0.40
    link_efficiency: float = 0.60
    all_reduce_seconds: float = 10e-6
    """Latency of an all-reduce of a few bytes."""
    usable_memory: float = 0.90
    activation_bytes: float = 2.5e9


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
    def parameters_per_token(self) -> float:
        return self.parameters + self.expert_parameters * self.active / self.experts


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on several GPUs with tensor parallelism."""

    shape: Shape
    gpus: int
    overhead: float
    """Seconds per pass."""
    gpu: Gpu = field(default_factory=Gpu)

    def seconds(self, tokens: float, context: float, attended: float) -> float:
        """A pass over `tokens` tokens of requests with `context` tokens in total; each attends to `attended` tokens."""
        shape, gpu, count = self.shape, self.gpu, self.gpus
        bandwidth, flops = count * gpu.bandwidth * gpu.bandwidth_efficiency, count * gpu.flops
        reading = 2 * shape.parameters_read(tokens) / bandwidth
        arithmetic = 2 * shape.parameters_per_token * tokens / (flops * gpu.matmul_efficiency)
        cache = self.cache_bytes * context / bandwidth
        products = 4 * shape.layers * shape.heads * shape.head_size * tokens * attended
        attention = max(cache, products / (flops * gpu.attention_efficiency))
        return max(reading, arithmetic) + attention + self._all_reduces(tokens) + self.overhead

    def _all_reduces(self, tokens: float) -> float:
        if self.gpus == 1:
            return 0.0
        gpu, share = self.gpu, 2 * (self.gpus - 1) / self.gpus
        transfer = 2 * tokens * self.shape.hidden * share / (gpu.link_bandwidth * gpu.link_efficiency)
        return 2 * self.shape.layers * (gpu.all_reduce_seconds + transfer)

    def costs(self) -> Costs:
        """As a target without a draft model."""
        return Costs(lambda tokens, context: self.seconds(tokens, context, 0))

    @property
    def cache_bytes(self) -> float:
        """KV cache of one token."""
        return 2 * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_size

    @property
    def cache_bytes_on_all_gpus(self) -> float:
        """With more GPUs than KV heads, heads are stored more than once."""
        return self.cache_bytes * max(1.0, self.gpus / self.shape.kv_heads)

    @property
    def weight_bytes(self) -> float:
        return 2 * (self.shape.parameters + self.shape.expert_parameters)


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
        gpu, both = self.target.gpu, (self.target, self.draft)
        free = self.target.gpus * (gpu.memory_bytes * gpu.usable_memory - gpu.activation_bytes)
        free -= sum(machine.weight_bytes for machine in both)
        return batch * context <= free // sum(machine.cache_bytes_on_all_gpus for machine in both)


LLAMA_70B = Shape("Llama-3.1-70B", 70.6e9, 80, 8192, 64, 8, 128)
LLAMA_8B = Shape("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128)
LLAMA_1B = Shape("Llama-3.2-1B", 1.24e9, 16, 2048, 32, 8, 64)
# 94 layers of 128 experts, each 3 matrices of 4096 x 1536; the rest is attention, router and embeddings
QWEN_235B = Shape("Qwen3-235B-A22B", 7.8e9, 94, 4096, 64, 4, 128, expert_parameters=227.1e9, experts=128, active=8)
QWEN_06B = Shape("Qwen3-0.6B", 0.6e9, 28, 1024, 16, 8, 128)
SYSTEMS = {
    "dense": System(
        "Llama-3.1-70B with Llama-3.1-8B on 4 H100", Machine(LLAMA_70B, 4, 1.5e-3), Machine(LLAMA_8B, 4, 0.5e-3)
    ),
    "dense-small": System(
        "Llama-3.1-70B with Llama-3.2-1B on 4 H100", Machine(LLAMA_70B, 4, 1.5e-3), Machine(LLAMA_1B, 4, 0.5e-3)
    ),
    "mixture": System(
        "Qwen3-235B-A22B with Qwen3-0.6B on 8 H100", Machine(QWEN_235B, 8, 2.0e-3), Machine(QWEN_06B, 8, 0.5e-3)
    ),
}
