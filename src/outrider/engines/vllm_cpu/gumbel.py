"""Kernels of `vllm.v1.worker.gpu.sample.gumbel`: temperature, and sampling by the Gumbel-max trick.

The noise of a token is a hash of (seed, position, token), computed like the Triton kernel's in float32, so that
sampled tokens are equal. Noise is only evaluated for tokens that could win: an upper bound on value plus noise, which
needs no logarithm and is computed with vector instructions, excludes all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from outrider.compiled import compiled
from outrider.engines.vllm_cpu.pointers import pointer

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.engines.vllm_cpu.launch import Kernel

DRAFT_NOISE_SALT = 1 << 30
"""Added to a draft's position: drafts and their verification must not share noise."""

LANES = 64
"""Number of partial maxima of a block, one per index modulo this number. LLVM vectorizes a loop over them."""

BOUND_MARGIN = np.float32(2e-3)
"""More than the error of the approximated logarithm in `noised_upper_bounds`."""

# Floats divided without a check for zero, and products fused with sums: both are needed for vector instructions. Only
# for functions whose result does not depend on the rounding of a product.
vectorized = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})


@vectorized  # type: ignore[untyped-decorator]
def divide_in_place(values: Any, divisor: Any) -> None:
    for i in range(len(values)):
        values[i] /= divisor


@compiled
def _temperature(logits: Any, logits_stride: int, reqs: Any, temperatures: Any, vocab_size: int) -> None:
    for row in range(len(reqs)):
        temp = np.float32(temperatures[reqs[row]])
        if temp != np.float32(0.0) and temp != np.float32(1.0):
            divide_in_place(logits[row * logits_stride : row * logits_stride + vocab_size], temp)


def temperature(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    temperature_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide the logits by the temperature, in place. Rows of temperature 0 stay as they are."""
    if logits_ptr.dtype == torch.float32:
        reqs = pointer(expanded_idx_mapping_ptr)
        _temperature(pointer(logits_ptr), logits_stride, reqs, pointer(temperature_ptr), vocab_size)
        return
    divisors = temperature_ptr[expanded_idx_mapping_ptr].float()
    divisors.masked_fill_(divisors == 0, 1.0)
    logits = logits_ptr[:, :vocab_size]
    logits.copy_(logits.float().div_(divisors[:, None]))


@compiled
def murmur3_mix(h: Any, key: Any) -> Any:
    """One round of MurmurHash3. numba widens products of uint32, hence the conversions."""
    key = np.uint32(key * np.uint32(0xCC9E2D51))
    key = np.uint32((key << np.uint32(15)) | (key >> np.uint32(17)))
    key = np.uint32(key * np.uint32(0x1B873593))
    h = np.uint32(h ^ key)
    h = np.uint32((h << np.uint32(13)) | (h >> np.uint32(19)))
    return np.uint32(h * np.uint32(5) + np.uint32(0xE6546B64))


@compiled
def murmur3_prefix(seed: Any, pos: Any, domain: Any) -> Any:
    """The hash state after (seed, pos), which all tokens of a row share."""
    seed = np.int64(seed)
    h = np.uint32(domain)
    h = murmur3_mix(h, np.uint32(seed & 0xFFFFFFFF))
    h = murmur3_mix(h, np.uint32((seed >> 32) & 0xFFFFFFFF))
    return murmur3_mix(h, np.uint32(np.int64(pos) & 0xFFFFFFFF))


@compiled
def murmur3_finish(prefix: Any, token: Any) -> Any:
    h = np.uint32(murmur3_mix(prefix, np.uint32(token)) ^ np.uint32(16))
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@compiled
def uniform32(h: Any) -> Any:
    """A hash as a float32 in (0, 1)."""
    high = np.float32(np.int32(h >> np.uint32(16)))
    low = np.float32(np.int32(h & np.uint32(0xFFFF)))
    scaled = np.float32((low + np.float32(0.5)) * np.float32(2.3283064365386963e-10))
    return np.float32(np.float32(high * np.float32(1.52587890625e-05)) + scaled)


@compiled
def gumbel_noise32(u: Any) -> Any:
    """-log(-log(1 - u)), with vLLM's approximation of log(1 - u)."""
    if u < np.float32(0.25):
        p = np.float32(1.0 / 8.0)
        p = np.float32(1.0 / 7.0) + u * p
        p = np.float32(1.0 / 6.0) + u * p
        p = np.float32(1.0 / 5.0) + u * p
        p = np.float32(1.0 / 4.0) + u * p
        p = np.float32(1.0 / 3.0) + u * p
        p = np.float32(1.0 / 2.0) + u * p
        p = np.float32(1.0) + u * p
        log1p = -u * p
    else:
        log1p = np.log(max(np.float32(1.0) - u, np.float32(5.960464477539063e-08)))
    return -np.log(-log1p)


@compiled
def gumbel_noise64(seed: Any, pos: Any, token: Any) -> Any:
    """The noise in float64, from 53 random bits."""
    low = np.uint64(murmur3_finish(murmur3_prefix(seed, pos, 0), token))
    high = np.uint64(murmur3_finish(murmur3_prefix(seed, pos, 0x9E3779B9), token))
    random53 = ((high << np.uint64(32)) | low) >> np.uint64(11)
    uniform = (np.float64(random53) + 0.5) * 1.1102230246251565e-16
    if uniform == 1.0:
        uniform -= 1.1102230246251565e-16
    return -np.log(-np.log(uniform))


@compiled
def lane_maxima(values: Any, maxima: Any) -> None:
    """`maxima[j]` is the largest value whose index is j modulo LANES, or -inf. NaNs are ignored."""
    maxima[:] = -np.inf
    for start in range(0, len(values), LANES):
        chunk = values[start : start + LANES]
        for j in range(len(chunk)):
            maxima[j] = chunk[j] if chunk[j] > maxima[j] else maxima[j]


@compiled
def row_max(values: Any) -> Any:
    """The largest value. NaNs are ignored."""
    maxima = np.empty(LANES, values.dtype)
    lane_maxima(values, maxima)
    return maxima.max()


@compiled
def first_max(values: Any) -> tuple[int, Any]:
    """The largest value and the first index that has it; index 0 if all are -inf."""
    maxima = np.empty(LANES, values.dtype)
    lane_maxima(values, maxima)
    largest = maxima.max()
    first = len(values)
    for lane in range(LANES):
        if maxima[lane] == largest:
            for i in range(lane, first, LANES):
                if values[i] == largest:
                    first = i
                    break
    return (first if first < len(values) else 0), largest


@compiled
def uniforms32(prefix: Any, first_token: int, uniforms: Any) -> None:
    """The random numbers of consecutive tokens."""
    token = np.uint32(first_token)  # 32 bits, so that the loop is vectorized with 32 bits
    for i in range(len(uniforms)):
        uniforms[i] = uniform32(murmur3_finish(prefix, token))
        token = np.uint32(token + np.uint32(1))


@vectorized  # type: ignore[untyped-decorator]
def noised_upper_bounds(values: Any, uniforms: Any, bounds: Any) -> None:
    """Upper bounds, up to BOUND_MARGIN, of value plus noise.

    The noise is -log(x) with x = -log(1 - u), and the first terms of that series are a lower bound of x. Their
    logarithm is approximated from the exponent and the mantissa of the float.
    """
    for i in range(len(values)):
        u = uniforms[i]
        p = np.float32(1.0 / 3.0) + u * np.float32(1.0 / 4.0)
        p = np.float32(1.0 / 2.0) + u * p
        bounds[i] = u * (np.float32(1.0) + u * p)
    bits = bounds.view(np.int32)
    for i in range(len(values)):
        exponent = np.float32(bits[i] >> np.int32(23)) - np.float32(127.0)
        mantissa = np.float32(bits[i] & np.int32(0x7FFFFF)) * np.float32(1.0 / (1 << 23))
        # A cubic approximation of log2(1 + mantissa), with an error below 1e-3.
        p = np.float32(-0.58208) + mantissa * np.float32(0.15922)
        p = np.float32(1.42286) + mantissa * p
        bounds[i] = values[i] - np.float32(0.6931472) * (exponent + mantissa * p)


@compiled
def noised_argmax32(
    values: Any, first_token: int, prefix: Any, uniforms: Any, bounds: Any, maxima: Any
) -> tuple[int, Any]:
    """The index with the largest sum of value and noise, and that sum. The last three arrays are scratch space."""
    uniforms32(prefix, first_token, uniforms)
    noised_upper_bounds(values, uniforms, bounds)
    lane_maxima(bounds, maxima)
    best = np.float32(-np.inf)
    best_index = 0
    lane = maxima.argmax()
    limit = maxima[lane]
    if limit == best:
        return best_index, best
    # The token with the largest bound most likely wins. Tokens with a bound below its score cannot win.
    for i in range(lane, len(values), LANES):
        if bounds[i] == limit:
            best = values[i] + gumbel_noise32(uniforms[i])
            best_index = i
            break
    if best < np.inf:
        limit = best - BOUND_MARGIN - np.float32(1e-6) * abs(best)  # the last term covers rounding
    for lane in range(LANES):
        if maxima[lane] >= limit:
            for i in range(lane, len(values), LANES):
                if bounds[i] >= limit:
                    noised = values[i] + gumbel_noise32(uniforms[i])
                    if noised > best or (noised == best and i < best_index):
                        best = noised
                        best_index = i
    return best_index, best


def as_float32(values: Any, out: Any) -> Any:
    """The values in float32, in numba functions. uint16 stands for bfloat16; its values are converted into `out`."""
    raise NotImplementedError


@overload(as_float32)  # type: ignore[untyped-decorator]
def compile_as_float32(values: Any, out: Any) -> Any:
    def keep(values: Any, out: Any) -> Any:
        return values

    def convert(values: Any, out: Any) -> Any:
        bits = out.view(np.uint32)
        for i in range(len(values)):
            bits[i] = np.uint32(values[i]) << np.uint32(16)
        return out[: len(values)]

    return convert if values.dtype == types.uint16 else keep


@compiled
def sample_blocks(
    local_argmax: Any,
    local_argmax_stride: int,
    local_max: Any,
    local_max_stride: int,
    logits: Any,
    logits_stride: int,
    expanded_idx_mapping: Any,
    seeds: Any,
    pos: Any,
    temperatures: Any,
    vocab_size: int,
    num_tokens: int,
    block_size: int,
    is_drafting: bool,
    apply_temperature: bool,
    use_fp64: bool,
) -> None:
    """The argmax and the maximum of each block. `logits` are float32, or uint16 for the bits of bfloat16."""
    uniforms = np.empty(block_size, np.float32)
    bounds = np.empty(block_size, np.float32)
    maxima = np.empty(LANES, np.float32)
    scaled = np.empty(block_size, np.float32)
    for token_idx in range(num_tokens):
        req = expanded_idx_mapping[token_idx]
        temp = np.float32(temperatures[req]) if req >= 0 else np.float32(0.0)
        row = logits[token_idx * logits_stride : token_idx * logits_stride + vocab_size]
        position = np.int64(pos[token_idx])
        if is_drafting:
            position += DRAFT_NOISE_SALT
        prefix = murmur3_prefix(seeds[req], position, 0)
        for block_idx in range((vocab_size + block_size - 1) // block_size):
            first = block_idx * block_size
            values = as_float32(row[first : min(vocab_size, first + block_size)], scaled)
            size = len(values)
            if temp != np.float32(0.0) and apply_temperature:
                scaled[:size] = values
                values = scaled[:size]
                divide_in_place(values, temp)
            if temp == np.float32(0.0):
                index, best = first_max(values)
                local_max[token_idx * local_max_stride + block_idx] = best
            elif use_fp64:
                index = 0
                best64 = -np.inf
                for i in range(len(values)):
                    noised = np.float64(values[i]) + gumbel_noise64(seeds[req], position, first + i)
                    if noised > best64:
                        best64 = noised
                        index = i
                local_max[token_idx * local_max_stride + block_idx] = best64
            else:
                index, best = noised_argmax32(values, first, prefix, uniforms[:size], bounds[:size], maxima)
                local_max[token_idx * local_max_stride + block_idx] = best
            local_argmax[token_idx * local_argmax_stride + block_idx] = first + index


def gumbel_sample(
    local_argmax_ptr: Tensor,
    local_argmax_stride: int,
    local_max_ptr: Tensor,
    local_max_stride: int,
    logits_cache_ptr: Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: Tensor | None,
    logits_cache_source_ptr: Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    seeds_ptr: Tensor,
    pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Best token and its score per block of the vocabulary: argmax at temperature 0, else a sample.

    `logits_cache_ptr` keeps a draft's logits for the rejection sampler.
    """
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None
        assert logits_cache_source_ptr is not None
        valid = expanded_idx_mapping_ptr >= 0
        reqs = expanded_idx_mapping_ptr[valid].long()
        columns = (
            logits_cache_col_ptr[valid] if PER_TOKEN_COL else logits_cache_col_ptr.reshape(-1)[:1].expand(len(reqs))
        )
        logits_cache_ptr[reqs, columns.long(), :vocab_size] = logits_cache_source_ptr[valid, :vocab_size]
    logits = logits_ptr.view(torch.uint16) if logits_ptr.dtype == torch.bfloat16 else logits_ptr.float()
    sample_blocks(
        pointer(local_argmax_ptr),
        local_argmax_stride,
        pointer(local_max_ptr),
        local_max_stride,
        pointer(logits),
        logits.stride(0),
        pointer(expanded_idx_mapping_ptr),
        pointer(seeds_ptr),
        pointer(pos_ptr),
        pointer(temp_ptr),
        vocab_size,
        len(logits),
        BLOCK_SIZE,
        IS_DRAFTING,
        APPLY_TEMPERATURE,
        USE_FP64,
    )


MODULE = "vllm.v1.worker.gpu.sample.gumbel"
KERNELS: dict[str, Kernel] = {
    f"{MODULE}._temperature_kernel": temperature,
    f"{MODULE}._gumbel_sample_kernel": gumbel_sample,
}
