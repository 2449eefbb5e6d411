"""Systems of the papers that no night needs: trained and self drafters, sampling rules, lists of items.

Each is a plug-in, found by the entry points of `pyproject.toml`; nothing outside this folder imports it.
"""
