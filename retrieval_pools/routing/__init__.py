"""Choosing the group that an entity drafts from: by attributes, by embeddings, and the router between these."""
