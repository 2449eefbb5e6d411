"""The only package that imports ray: actors, the queue of shards, the start of a cluster."""
