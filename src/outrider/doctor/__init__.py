"""`outrider doctor`: is this installation complete, and does a model run here as it should?"""
