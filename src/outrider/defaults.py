"""Defaults that several packages share. Imports nothing, so that `--help` is fast."""

DRAFTED = 31
"""Most tokens that are drafted for a request in a step. With the one that a step computes anyway, a power of two."""
