"""Attention of a packed step: the plan of what sees what, and each way to compute it."""
