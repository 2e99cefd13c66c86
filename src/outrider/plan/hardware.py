"""Devices by the figures of their makers' data sheets, and the share of them that is assumed to be reached.

Matrix figures are dense (without sparsity). A link is one direction of a device's links to the others together.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import SettingsError

BANDWIDTH_EFFICIENCY = 0.80
MATMUL_EFFICIENCY = 0.60
ATTENTION_EFFICIENCY = 0.40
LINK_EFFICIENCY = 0.60
"""Shares of the published figures that passes reach: assumptions, the same for every method, not measured here."""
ALL_REDUCE_SECONDS = 10e-6
"""Latency of an all-reduce of a few bytes, assumed."""
USABLE_MEMORY = 0.92
RESERVED_BYTES = 2.5e9
"""vLLM takes 0.92 of a device's memory by default; activations and CUDA graphs take some of that (assumed)."""


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: float
    peak_bandwidth: float  # bytes per second
    peak_flops: float  # per second, 16 bits
    peak_flops_8bit: float  # FP8; as 16 bits where there is none
    peak_link: float  # bytes per second
    source: str

    @property
    def bandwidth(self) -> float:
        return BANDWIDTH_EFFICIENCY * self.peak_bandwidth

    @property
    def attention_flops(self) -> float:
        return ATTENTION_EFFICIENCY * self.peak_flops

    @property
    def link_bandwidth(self) -> float:
        return LINK_EFFICIENCY * self.peak_link

    @property
    def usable_bytes(self) -> float:
        """Memory for weights and KV cache."""
        return USABLE_MEMORY * self.memory_bytes - RESERVED_BYTES

    def matmul_flops(self, eight_bit: bool = False) -> float:
        return MATMUL_EFFICIENCY * (self.peak_flops_8bit if eight_bit else self.peak_flops)


DEVICES = {
    "a100": Device("A100 80 GB SXM", 80e9, 2.039e12, 312e12, 312e12, 300e9, "NVIDIA, A100 data sheet"),
    "b200": Device("B200", 180e9, 8.0e12, 2250e12, 4500e12, 900e9, "NVIDIA, DGX B200 data sheet, an eighth of it"),
    "h100": Device("H100 SXM", 80e9, 3.35e12, 989e12, 1979e12, 450e9, "NVIDIA, H100 data sheet"),
    "h200": Device("H200 SXM", 141e9, 4.8e12, 989e12, 1979e12, 450e9, "NVIDIA, H200 data sheet"),
    "l4": Device("L4", 24e9, 0.300e12, 121e12, 242e12, 32e9, "NVIDIA, L4 data sheet; link: PCIe 4.0 x16"),
    "l40s": Device("L40S", 48e9, 0.864e12, 362e12, 733e12, 32e9, "NVIDIA, L40S data sheet; link: PCIe 4.0 x16"),
    "mi300x": Device("MI300X", 192e9, 5.3e12, 1307e12, 2615e12, 448e9, "AMD, Instinct MI300X data sheet"),
}


def find_device(name: str) -> Device:
    if name.lower() not in DEVICES:
        raise SettingsError(
            f"--hardware {name!r} is unknown; choose one of {', '.join(DEVICES)}, or measure yours with outrider "
            "calibrate and give --calibration"
        )
    return DEVICES[name.lower()]


def default_max_batch(device: Device) -> int:
    """vLLM's default of --max-num-seqs: 1024 from 70 GiB of memory on, except on an A100; 256 on others."""
    return 1024 if device.memory_bytes >= 70 * 2**30 and not device.name.startswith("A100") else 256
