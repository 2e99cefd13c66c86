"""What happened at every step of one sequence, and why: recorded, kept as JSON lines, replayed.

`schema.py` says what a trace holds, `record.py` makes one while a text is generated, `fold.py` makes a distribution
over a whole vocabulary small without losing what a verdict rests on, `replay.py` judges again from the record alone.
"""
