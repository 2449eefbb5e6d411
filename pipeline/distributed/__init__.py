"""The only place that imports ray: actors, the shard queue, cluster start-up."""
