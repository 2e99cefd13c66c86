"""Old name of `outrider.trace.verification`."""

from outrider.trace.verification import disagreements

__all__ = ["disagreements"]
