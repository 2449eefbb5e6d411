"""Pools of earlier texts, as a library: what is drafted from them, and for whom.

An engine of any kind calls `library`, which docs/pools-library.md shows. What it stands on, and our own engine calls:
`index.build.build_pool` makes a `index.pool.Pool` of texts, `index.store.PoolStore` keeps the versions of both sides,
`draft.draft_batch` says what sequences are likely to go on with, and `routing.router.Router` names an entity's group.
"""
