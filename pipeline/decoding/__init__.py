"""The engine: draft, forward, verify, commit."""
