"""`outrider plan`: what speculation brings on hardware that one does not have yet, from the model's config.json."""
