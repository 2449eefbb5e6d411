"""From a context to a tree of likely continuations, compiled; `retrieval_pools.draft` is how it is called."""
