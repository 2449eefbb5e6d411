"""Encoding texts to vectors, clustering the vectors, and writing both to feature tables."""
