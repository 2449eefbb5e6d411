"""Attention over slots of the KV cache: what sees what, and three ways to compute it."""
