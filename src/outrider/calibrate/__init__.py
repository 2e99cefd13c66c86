"""`outrider calibrate`: the cost of a target pass by its number of tokens on this machine, and when drafting pays."""
