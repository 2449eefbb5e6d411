"""The draft functions, with draft options as keyword arguments."""

from laserbatch.retrieval_pools import draft as drafting
from laserbatch.retrieval_pools.draft import UNLIMITED_DEPTH, Draft, DraftOptions, Drafts


def draft(pool, context, num_prompt, previous=None, group=None, max_depth=UNLIMITED_DEPTH, **options) -> Draft:
    return drafting.draft(pool, context, num_prompt, previous, group, _named(options), max_depth)


def draft_batch(
    pool, contexts, num_prompts, previous=None, groups=None, max_depths=None, num_threads=1, **options
) -> Drafts:
    columns = previous, groups, max_depths
    return drafting.draft_batch(pool, contexts, num_prompts, *columns, _named(options), num_threads)


def _named(options: dict) -> DraftOptions:
    return DraftOptions(**{"min_acceptance": 0.02} | options)
