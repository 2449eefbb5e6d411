"""Where the output's end occurs in the sequence's own texts: previous, prompt and output."""

import numpy as np

from laserbatch.retrieval_pools.compiled import called, part
from laserbatch.retrieval_pools.drafting.state import END, NUM_LOCAL_POSITIONS
from laserbatch.retrieval_pools.sources import SOURCE_PREVIOUS, SOURCE_PROMPT


@called
def match_own_text(text, begin, end, is_whole_text, context, positions):
    """Where the longest end of the output occurs in `text[begin:end]`: length, number, and the latest in `positions`.

    In a whole text (the previous one) what begins it matches what begins the output, and its end is known.
    """
    tokens, num_prompt = context.tokens, context.num_prompt
    num_tokens = tokens.shape[0]
    if num_tokens == num_prompt:  # nothing written yet: only a whole text has a start
        positions[0] = begin
        return (1, 1) if is_whole_text else (0, 0)
    longest, count = 0, 0
    last_token = tokens[num_tokens - 1]
    for j in range(end - 1 if is_whole_text else end - 2, begin - 1, -1):
        if text[j] != last_token:
            continue
        length = 1
        while length < context.max_match and j - length >= begin and num_tokens - 1 - length >= num_prompt:
            if text[j - length] != tokens[num_tokens - 1 - length]:
                break
            length += 1
        if is_whole_text and length < context.max_match and length == j + 1 and num_tokens - length == num_prompt:
            length += 1  # both begin here
        if length > longest:
            longest, count = length, 0
        if length == longest and count < NUM_LOCAL_POSITIONS:
            positions[count] = j + 1
            count += 1
    return longest, count


@part
def own_token(context, source, position):
    """The token of an own text, END behind the previous one."""
    if source == SOURCE_PREVIOUS:
        return context.previous[position] if position < context.previous.shape[0] else np.int32(END)
    return context.tokens[position]


@part
def last_position(context, source):
    """The last position at which a next token is known."""
    if source == SOURCE_PREVIOUS:
        return context.previous.shape[0]
    return context.num_prompt - 1 if source == SOURCE_PROMPT else context.tokens.shape[0] - 1
