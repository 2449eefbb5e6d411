"""The compiled code that drafts a tree of likely continuations of a context; `retrieval_pools.draft` calls it."""
