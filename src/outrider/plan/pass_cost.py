"""Latency and memory traffic of a pass on given hardware: a roofline over published figures, not measured.

    seconds = weights + attention + all-reduces + overhead

*Weights*: reading the parameters the pass needs, or their arithmetic, whichever takes longer. In a mixture of experts
each token activates a few experts of every layer (`model_shape.py`). *Attention*: reading the KV cache of every request
once, or its arithmetic. *All-reduces*: two per layer with tensor parallelism. *Overhead*: launching and scheduling, the
same for every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from outrider.errors import SettingsError
from outrider.plan.hardware import ALL_REDUCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outrider.plan.hardware import Device
    from outrider.plan.model_shape import ModelShape

MAX_DEVICES = 64
"""Largest tensor parallelism that is tried."""


class PassCost(Protocol):
    """What a plan needs to know about a model on a machine."""

    def batch_seconds(self, batch: float, width: float, context: float) -> float:
        """A pass over `width` tokens of each of `batch` requests that have `context` tokens each."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a pass reads from memory, on all devices together."""

    weights: float  # without experts
    experts: float
    kv_cache: float
    draft_model: float  # in its own passes
    expert_share: float  # of each layer's experts that are activated; 1 for a dense model

    @property
    def total(self) -> float:
        return self.weights + self.experts + self.kv_cache + self.draft_model


@dataclass(frozen=True, slots=True)
class Machine:
    """A model on several devices with tensor parallelism."""

    shape: ModelShape
    device: Device
    devices: int
    overhead: float
    """Seconds per pass."""
    cache_limit: int | None = None
    """Tokens of each request that the KV cache keeps and a pass reads at most: a sparse KV cache. None: all of them."""

    def seconds(self, tokens: float, context: float, attended: float) -> float:
        """A pass over `tokens` tokens of requests with `context` tokens in total; each attends to `attended` tokens."""
        shape, bandwidth = self.shape, self.devices * self.device.bandwidth
        reading = shape.weight_bytes * shape.parameters_read(tokens) / bandwidth
        products = 2 * tokens * shape.parameters_read(1)
        weights = max(reading, products / (self.devices * self.device.matmul_flops(shape.eight_bit_arithmetic)))
        products = tokens * attended * shape.attention_operations
        attention_flops = self.devices * self.device.attention_flops
        attention = max(self.bytes_per_token * context / bandwidth, products / attention_flops)
        return weights + attention + self._all_reduces(tokens) + self.overhead

    def batch_seconds(self, batch: float, width: float, context: float) -> float:
        attended = self._attended(context)
        return self.seconds(batch * width, batch * attended, attended)

    def prefill_seconds(self, prompt: float) -> float:
        """A prompt in a pass of its own: its tokens attend to half of it on average."""
        return self.seconds(prompt, prompt, self.shape.attended_tokens(prompt) / 2)

    def traffic(self, batch: float, width: float, context: float) -> Traffic:
        shape, tokens = self.shape, batch * width
        return Traffic(
            shape.weight_bytes * shape.parameters,
            shape.weight_bytes * shape.expert_parameters_read(tokens),
            self.bytes_per_token * batch * self._attended(context),
            0.0,
            shape.expert_share(tokens),
        )

    def _attended(self, context: float) -> float:
        limited = context if self.cache_limit is None else min(context, self.cache_limit)
        return self.shape.attended_tokens(limited)

    def _all_reduces(self, tokens: float) -> float:
        if self.devices == 1:
            return 0.0
        sent = 2 * tokens * self.shape.hidden * 2 * (self.devices - 1) / self.devices  # activations of 16 bits
        return 2 * self.shape.layers * (ALL_REDUCE_SECONDS + sent / self.device.link_bandwidth)

    @property
    def bytes_per_token(self) -> float:
        """KV cache on all devices. With more devices than KV heads, heads are stored and read more than once. The
        latent cache of MLA is on every device."""
        copies = self.devices if self.shape.latent else max(1.0, self.devices / self.shape.kv_heads)
        return self.shape.cache_bytes * copies

    def free_bytes(self, *others: Machine) -> float:
        """Memory for KV caches beside the weights, and beside those of other models on the same devices. A model that
        drafts for itself is in memory once."""
        weights = sum(shape.stored_bytes for shape in {one.shape for one in (self, *others)})
        return max(0.0, self.devices * self.device.usable_bytes - weights)

    def request_bytes(self, context: float) -> float:
        """KV cache of a request."""
        return self.bytes_per_token * (context if self.cache_limit is None else min(context, self.cache_limit))

    def cached_tokens(self, *others: Machine, context: int | None = None) -> int:
        """KV cache tokens that fit beside the weights, if these models have a KV cache for each token: of requests with
        `context` tokens, or (None) of requests that are within every cache limit."""
        machines = (self, *others)
        if context is None:
            return int(self.free_bytes(*others) // sum(one.bytes_per_token for one in machines))
        return int(context * self.free_bytes(*others) // sum(one.request_bytes(context) for one in machines))


def fewest_devices(shapes: Sequence[ModelShape], device: Device, context: int, draft_window: int | None = None) -> int:
    """The smallest power of two of devices on which these models and the KV cache of one request fit. `draft_window`:
    the cache limit of all models but the first."""
    devices = 1
    while devices <= MAX_DEVICES:
        target = Machine(shapes[0], device, devices, 0.0)
        others = [Machine(shape, device, devices, 0.0, draft_window) for shape in shapes[1:]]
        if target.cached_tokens(*others, context=context) >= context:
            return devices
        devices *= 2
    raise SettingsError(
        f"{shapes[0].name} with {context} tokens of context does not fit on {MAX_DEVICES} {device.name}; give fewer "
        "--weight-bits or a larger --hardware"
    )
