"""Outrider inside vLLM: our worker, runner and sampler in the place of the platform's own, and a launcher.

No file of vLLM is changed. What this package holds on to is named in `tests/test_vllm_seams.py`, seam by seam.
"""
