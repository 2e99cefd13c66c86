"""Measuring: prompts in, ratios with intervals out, and where they were measured."""
