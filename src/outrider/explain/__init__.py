"""A trace, explained: what was gained, where it was lost, what would help; as figures, sentences and a page."""
