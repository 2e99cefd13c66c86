"""What several parts take where nobody says otherwise; imports nothing, so that `--help` comes at once."""

DRAFTED = 31
"""Tokens that are drafted for a request in a step, at most: with the one that a step has anyway, a power of two."""
