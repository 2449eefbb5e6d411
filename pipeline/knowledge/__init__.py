"""Prompts for the model, and the parts of its answers that are kept."""
