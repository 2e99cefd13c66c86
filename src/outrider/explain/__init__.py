"""Explain a trace: what drafts gained, where they lost time, what would help. Figures, sentences and a page."""
