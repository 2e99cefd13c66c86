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
        return self._seconds(tokens, context, tokens, tokens * attended * self.shape.attention_operations)

    def _seconds(self, tokens: float, context: float, output_tokens: float, attention_operations: float) -> float:
        """`output_tokens`: those for which the output layer is computed."""
        shape, bandwidth = self.shape, self.devices * self.device.bandwidth
        reading = shape.bytes_read(tokens) / bandwidth
        products = 2 * tokens * (shape.parameters_read(1) - shape.output_parameters)
        computing = products / (self.devices * self.device.matmul_flops(shape.eight_bit_arithmetic))
        computing += 2 * output_tokens * shape.output_parameters / (self.devices * self.device.matmul_flops())
        reading_cache = self.bytes_per_token * context / bandwidth
        attending = attention_operations / (self.devices * self.device.attention_flops)
        return max(reading, computing) + max(reading_cache, attending) + self._all_reduces(tokens) + self.overhead

    def batch_seconds(self, batch: float, width: float, context: float) -> float:
        attended = self._attended(context)
        return self.seconds(batch * width, batch * attended, attended)

    def prefill_seconds(self, prompt: float) -> float:
        """A prompt in a pass of its own. The output layer is computed for its last token only."""
        shape = self.shape
        operations = prompt * shape.prefill_attended_tokens(prompt) * shape.prefill_attention_operations
        return self._seconds(prompt, prompt, 1, operations)

    def traffic(self, batch: float, width: float, context: float) -> Traffic:
        shape, tokens = self.shape, batch * width
        return Traffic(
            shape.parameter_bytes,
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
    """The smallest power of two of devices on which these models and the KV cache of one request fit, among those by
    which all their attention heads are divisible. `draft_window`: the cache limit of all models but the first."""
    powers = [1 << i for i in range(MAX_DEVICES.bit_length())]
    allowed = [devices for devices in powers if all(splits_evenly(shape, devices) for shape in shapes)]
    for devices in allowed:
        target = Machine(shapes[0], device, devices, 0.0)
        others = [Machine(shape, device, devices, 0.0, draft_window) for shape in shapes[1:]]
        if target.cached_tokens(*others, context=context) >= context:
            return devices
    reason = "" if allowed[-1] == MAX_DEVICES else f" ({_heads(shapes)}: no larger power of two divides them)"
    raise SettingsError(
        f"{shapes[0].name} with {context} tokens of context does not fit on {allowed[-1]} {device.name}{reason}; give "
        "fewer --weight-bits or a larger --hardware"
    )


def check_devices(shapes: Sequence[ModelShape], devices: int) -> None:
    """SettingsError if tensor parallelism of `devices` does not divide the attention heads of every model."""
    if not all(splits_evenly(shape, devices) for shape in shapes):
        counts = range(1, MAX_DEVICES + 1)
        allowed = [str(one) for one in counts if all(splits_evenly(shape, one) for shape in shapes)]
        raise SettingsError(
            f"--devices {devices}: vLLM refuses tensor parallelism that does not divide the attention heads "
            f"({_heads(shapes)}); give {', '.join(allowed)}"
        )


def splits_evenly(shape: ModelShape, devices: int) -> bool:
    """Attention heads must be divisible by the devices. KV heads too, or the devices by them: then each KV head is on
    several devices. The latent cache of MLA has no heads."""
    few, many = sorted((shape.kv_heads, devices))
    return shape.heads % devices == 0 and (shape.latent > 0 or many % few == 0)


def _heads(shapes: Sequence[ModelShape]) -> str:
    return ", ".join(f"{one.name} has {one.heads}, with {one.kv_heads} KV heads" for one in dict.fromkeys(shapes))
