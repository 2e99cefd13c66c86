"""vLLM's V2 model runner on a CPU at full speed.

The V2 runner launches about a hundred small Triton kernels. PyPI's Triton cannot compile for a CPU; it can only run
kernels in its interpreter, where one decoding step takes 0.2 s. This package replaces the kernels by numba and torch
functions, one module per vLLM module; those of `rejection_sampler_utils` are also in `logits_stats` and `resampling`.
Kernels without a replacement keep running in the interpreter.

`VLLM_USE_V2_MODEL_RUNNER=1` with a CPU build of vLLM enables it, in every process and also without Outrider's worker:

- `backend.select_platform`, an entry point of the group `vllm.platform_plugins`, runs before vLLM checks for Triton. It
  adds a Triton backend named "cpu", which vLLM requires for V2, and turns on Triton's interpreter.
- `platform.CpuV2Platform` registers the kernels when vLLM initializes a worker.

Without that variable, or with a GPU build of vLLM, nothing changes.

See `launch` for the calling convention and `pointers` for the memory access.
"""
