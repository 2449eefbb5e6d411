"""Memory of a device: what a model takes of it, and the KV caches."""
