"""Drafters besides retrieval: trained heads and small models, the model's alternatives (AASD), lookahead."""
