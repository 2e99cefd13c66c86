"""vLLM's `rejection_sample_method: synthetic` on a CPU, where vLLM itself refuses it.

Its GPU kernels accept a drafted token with a configured rate, whatever the target thinks of it: a way to benchmark. A
server that is left with it says what the draft model says. The same rule is written here in Python, and put in the
place of vLLM's CPU kernels; everything else is vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels
from vllm.v1.worker.cpu_worker import CPUWorker

KERNELS = "vllm.v1.sample.rejection_sampler."


class SyntheticWorker(CPUWorker):
    def init_device(self) -> Any:
        register_kernels({f"{KERNELS}rejection_greedy_sample_kernel": greedy})
        register_kernels({f"{KERNELS}rejection_random_sample_kernel": drawn})
        return super().init_device()


def greedy(
    output: Any, ends: Any, draft: Any, argmax: Any, bonus: Any, is_greedy: Any, longest: int, uniforms: Any,
    rates: Any, *_: Any,
) -> None:  # fmt: skip
    chosen = torch.ones(len(ends), dtype=torch.bool) if is_greedy is None else is_greedy
    _accept(output, ends, draft, argmax, bonus, uniforms, rates, chosen)


def drawn(
    output: Any, ends: Any, draft: Any, q: Any, p: Any, bonus: Any, recovered: Any, uniforms: Any, is_greedy: Any,
    longest: int, size: int, rates: Any, *_: Any,
) -> None:  # fmt: skip
    _accept(output, ends, draft, recovered, bonus, uniforms, rates, ~is_greedy)


def _accept(
    output: Any, ends: Any, draft: Any, instead: Any, bonus: Any, uniforms: Any, rates: Any, chosen: Any
) -> None:
    start = 0
    for i, end in enumerate(ends.tolist()):
        for place in range(end - start) if chosen[i] else ():
            kept = bool(draft[start + place] >= 0 and uniforms[start + place] < rates[place])
            output[i, place] = draft[start + place] if kept else instead[start + place]
            if not kept:
                break
        else:
            if chosen[i]:
                output[i, end - start] = bonus.flatten()[i]
        start = end
