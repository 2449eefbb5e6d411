"""Estimates held to what became of drafts: replays, curves and tables, with no LLM."""
