"""Systems of papers that nights do not need: trained drafters and self-drafting, sampling rules, lists of items.

Each is a plug-in, found by the entry points of `pyproject.toml`; nothing outside this folder imports it.
"""
