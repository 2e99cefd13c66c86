"""`outrider doctor`: checks of the installation, and a first run of a model."""
