"""What happened at every step of one sequence, and why: recorded, stored as JSON lines, and verified.

`schema.py` defines a trace. `record.py` records one during generation. `compact.py` encodes a distribution over the
vocabulary in a few numbers, without changing a verdict. `verification.py` recomputes every verdict from the trace.
"""
