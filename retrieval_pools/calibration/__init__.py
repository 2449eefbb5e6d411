"""Calibrating acceptance estimates by replaying texts, without an LLM."""
