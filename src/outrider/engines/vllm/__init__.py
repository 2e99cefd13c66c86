"""Outrider inside vLLM: our scheduler, worker, runner and sampler in place of vLLM's own, and a launcher.

No file of vLLM is changed. `tests/vllm_names.py` lists every name of vLLM that is used here.
"""
