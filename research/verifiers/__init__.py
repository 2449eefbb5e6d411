"""Verifiers besides the greedy and relaxed ones."""
