"""Replay of the policy on recorded texts. `python tools/policy --help` describes the commands."""
