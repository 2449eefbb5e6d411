"""Pools of earlier texts as a library: drafting from texts, and routing entities to groups of similar ones.

Any engine can call `library`; docs/pools-library.md shows how. Our own engine calls the parts below it directly:
`index.build.build_pool` makes an `index.pool.Pool` from texts, `index.store.PoolStore` keeps the versions of both
sides, `draft.draft_batch` drafts the next tokens of sequences, and `routing.router.Router` names an entity's group.
"""
