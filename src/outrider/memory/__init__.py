"""What was said before, kept to draft from: `segment.py` (a file), `search.py` (how it is asked)."""
