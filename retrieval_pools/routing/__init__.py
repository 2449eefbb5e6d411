"""Which group an entity drafts from: attributes, embeddings, and the router between them."""
