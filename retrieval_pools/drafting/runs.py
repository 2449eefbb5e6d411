"""Runs of the same next token: an interval is sorted by what follows, so a token's occurrences need not all be read."""

from retrieval_pools.drafting.intervals import sample_place
from retrieval_pools.drafting.state import part


@part
def token_at(index, first, stride, k, offset):
    """Next token, `offset` tokens on, of the k-th sample of an interval."""
    return index.tokens[index.order[sample_place(first, stride, k)] + offset]


@part
def end_of_run(index, first, stride, begin, num_samples, offset, token, last_token):
    """Where the run of `token` that begins at sample `begin` ends, and the token there: gallop, then bisect.

    `last_token` is that of the last sample; behind it the token is of no meaning.
    """
    if token == last_token:
        return num_samples, token
    inside, step = begin, 1
    outside, next_token = num_samples - 1, last_token
    while inside + step < outside:
        found = token_at(index, first, stride, inside + step, offset)
        if found != token:
            outside, next_token = inside + step, found
            break
        inside += step
        step <<= 1
    while outside - inside > 1:
        middle = (inside + outside) >> 1
        found = token_at(index, first, stride, middle, offset)
        if found == token:
            inside = middle
        else:
            outside, next_token = middle, found
    return outside, next_token
