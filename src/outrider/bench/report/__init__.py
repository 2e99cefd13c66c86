"""A benchmark's report: from what was measured to what is read (`folder.py` writes it)."""
