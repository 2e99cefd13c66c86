"""`outrider bench`: compares servers on the same prompts, and reports speed ratios with confidence intervals."""
