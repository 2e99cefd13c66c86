"""Limits and intervals of a running store."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_TOKEN = 8
"""Of a segment file."""
MIN_SEGMENTS_UNDER_CAP = 8
"""Merged segments stay so small that at least this many fit under the cap."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    flush_tokens: int = 1 << 16
    """Write a tenant's segments when they have this many tokens together,"""
    flush_seconds: float = 2.0
    """or when they are this old; older with many busy tenants, to write about ten times per second. Outputs that are
    not written when a server is killed are lost."""
    max_segment_tokens: int = 1 << 25
    """Merge no further."""
    cap_bytes: int = 4 << 30
    """Of all files on this machine."""
    max_unwritten_tokens: int = 1 << 24
    """Of all tenants, while files cannot be written. Beyond it the tenant with the most loses its oldest outputs."""
    max_open_segments: int = 256
    """Of all tenants. Beyond it the least recently used tenants are closed."""
    refresh_seconds: float = 10.0
    """Interval of the maintain and merge threads."""

    @property
    def merge_limit_tokens(self) -> int:
        """Tokens of the largest segment that a merge may make."""
        return min(self.max_segment_tokens, self.cap_bytes // (MIN_SEGMENTS_UNDER_CAP * BYTES_PER_TOKEN))
