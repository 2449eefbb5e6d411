"""Ways to draft beside retrieval: trained heads and small models, the model's alternatives (AASD), lookahead."""
