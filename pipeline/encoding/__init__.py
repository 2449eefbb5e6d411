"""Texts to vectors, vectors to cluster ids, both to feature tables."""
