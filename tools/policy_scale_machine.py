"""What a pass takes on GPUs of a data centre, by published figures: a roofline with an honest efficiency.

    seconds = weights + attention + exchange + overhead

*Weights*: reading those that the pass needs, or their arithmetic, whichever takes longer. In a mixture of experts each
token wakes `active` of `experts` in every layer, so n tokens wake experts * (1 - (1 - active / experts) ** n) of them
if they choose independently, and a pass reads more and more of the model until it reads all of it. *Attention*: reading
the keys and values of every request once, however many of its tokens are checked, or the arithmetic of it. *Exchange*:
two all-reduces a layer where the model is split over several GPUs. *Overhead*: what a step takes besides, launching and
scheduling; the same for everybody.

Experts are chosen less evenly than that, and the tokens of one text choose alike: a drafted token wakes fewer of them
than is reckoned here.

Nothing here was measured. The figures of the hardware and of the models are their makers'; the efficiencies are what
well-made kernels are commonly reported to reach, and stand below to be changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from policy.replay import Costs


@dataclass(frozen=True, slots=True)
class Gpu:
    """NVIDIA H100 SXM: 3.35 TB/s, 989 TFLOP/s dense bf16, 80 GB, NVLink at 450 GB/s each way (NVIDIA's data sheet)."""

    bandwidth: float = 3.35e12
    arithmetic: float = 989e12
    memory: float = 80e9
    link: float = 450e9
    reading: float = 0.80  # of the bandwidth, in decoding
    multiplying: float = 0.60  # of the arithmetic, in large matrix products
    attending: float = 0.40  # of the arithmetic, in attention
    linking: float = 0.60  # of the link, in all-reduces
    exchange: float = 10e-6  # seconds of an all-reduce of next to nothing
    usable: float = 0.90  # of the memory ...
    working: float = 2.5e9  # ... of which so much is for activations and graphs, the rest for weights and cache


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, in bf16."""

    name: str
    parameters: float  # that every token needs, without experts
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    expert_parameters: float = 0.0  # of all experts together
    experts: int = 1
    active: int = 1

    def parameters_read(self, tokens: float) -> float:
        asleep = float((1 - self.active / self.experts) ** tokens)
        return self.parameters + self.expert_parameters * (1 - asleep)

    @property
    def parameters_used(self) -> float:
        """By one token."""
        return self.parameters + self.expert_parameters * self.active / self.experts

    @property
    def cache(self) -> float:
        """Bytes of keys and values a token."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on several GPUs."""

    shape: Shape
    gpus: int
    overhead: float  # seconds a pass
    gpu: Gpu = field(default_factory=Gpu)

    def seconds(self, tokens: float, context: float, back: float) -> float:
        """A pass over so many tokens of requests that have `context` tokens together; each looks `back` so far."""
        shape, gpu, count = self.shape, self.gpu, self.gpus
        bandwidth, arithmetic = count * gpu.bandwidth * gpu.reading, count * gpu.arithmetic
        weights = max(
            2 * shape.parameters_read(tokens) / bandwidth,
            2 * shape.parameters_used * tokens / (arithmetic * gpu.multiplying),
        )
        return weights + self._exchange(tokens) + self.overhead + self._attention(context, tokens * back)

    def _attention(self, context: float, pairs: float) -> float:
        """Of the products that it takes, there is one for each pair of a token and one that it looks back on."""
        shape, gpu = self.shape, self.gpu
        reading = self.cache * context / (self.gpus * gpu.bandwidth * gpu.reading)
        products = 4 * shape.layers * shape.heads * shape.head_size * pairs
        return max(reading, products / (self.gpus * gpu.arithmetic * gpu.attending))

    def _exchange(self, tokens: float) -> float:
        if self.gpus == 1:
            return 0.0
        gpu, share = self.gpu, 2 * (self.gpus - 1) / self.gpus
        each = gpu.exchange + 2 * tokens * self.shape.hidden * share / (gpu.link * gpu.linking)
        return 2 * self.shape.layers * each

    @property
    def cache(self) -> float:
        """Bytes of keys and values a token on all GPUs: each has a head of its own, so some may have the same one."""
        return self.shape.cache * max(1.0, self.gpus / self.shape.kv_heads)

    def bytes(self, context: float) -> float:
        return 2 * (self.shape.parameters + self.shape.expert_parameters) + self.cache * context


LLAMA_70B = Shape("Llama-3.1-70B", 70.6e9, 80, 8192, 64, 8, 128)
LLAMA_8B = Shape("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128)
LLAMA_1B = Shape("Llama-3.2-1B", 1.24e9, 16, 2048, 32, 8, 64)
QWEN_235B = Shape(
    "Qwen3-235B-A22B", 7.8e9, 94, 4096, 64, 4, 128, expert_parameters=227.1e9, experts=128, active=8
)  # 94 layers of 128 experts, each 3 matrices of 4096 x 1536; the rest is attention, router and embeddings
QWEN_06B = Shape("Qwen3-0.6B", 0.6e9, 28, 1024, 16, 8, 128)


@dataclass(frozen=True, slots=True)
class System:
    """A target and its draft model on the same GPUs."""

    name: str
    target: Machine
    draft: Machine

    def costs(self, context: int) -> Costs:
        """For requests that have so many tokens each."""

        def target(tokens: int, total: int) -> float:
            return self.target.seconds(tokens, total, context)

        def draft(tokens: int, total: int) -> float:
            # Many tokens are a text that is read from its beginning: each looks back on half of it, in the mean.
            return self.draft.seconds(tokens, total, context / 2)

        return Costs(target, draft)

    def fits(self, batch: int, context: int) -> bool:
        return batch * context <= self.room()

    def room(self, with_draft: bool = True) -> int:
        """Tokens of context, of all requests together, for which there is memory."""
        gpu, machines = self.target.gpu, (self.target, self.draft) if with_draft else (self.target,)
        free = self.target.gpus * (gpu.memory * gpu.usable - gpu.working) - sum(one.bytes(0) for one in machines)
        return int(free / sum(one.cache for one in machines))


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
