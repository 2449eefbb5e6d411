"""Attention over slots of the KV cache: which keys a token sees, and three implementations."""
