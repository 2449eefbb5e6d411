"""The next tokens that one level knows: in the sequence's own texts (previous, prompt and output) and in the pool.

An interval of the pool is sorted by the tokens that follow, so the occurrences of a next token form a run.
"""

import numpy as np

from laserbatch.retrieval_pools.compiled import called, fetch, part
from laserbatch.retrieval_pools.drafting.intervals import is_of_group, is_supported, sample_place, sample_stride
from laserbatch.retrieval_pools.drafting.state import END, NUM_LOCAL_POSITIONS, NUM_RUNS
from laserbatch.retrieval_pools.sources import SOURCE_PREVIOUS, SOURCE_PROMPT


@called
def match_own_text(text, begin, end, is_whole_text, context, positions):
    """The length of the longest end of the output in `text[begin:end]`, and the number of `positions` set.

    They follow the latest occurrences. In a whole text (the previous one) the starts match too, and END can follow.
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
            length += 1  # the starts of both texts match
        if length > longest:
            longest, count = length, 0
        if length == longest and count < NUM_LOCAL_POSITIONS:
            positions[count] = j + 1
            count += 1
    return longest, count


@part
def own_token(context, source, position):
    """The token at a position of an own text; END after the last token of the previous text."""
    if source == SOURCE_PREVIOUS:
        return context.previous[position] if position < context.previous.shape[0] else np.int32(END)
    return context.tokens[position]


@part
def last_position(context, source):
    """The last position at which a next token is known."""
    if source == SOURCE_PREVIOUS:
        return context.previous.shape[0]
    return context.num_prompt - 1 if source == SOURCE_PROMPT else context.tokens.shape[0] - 1


@part
def list_own_runs(runs, context, source, positions, num_positions):
    """List the tokens at positions of an own text as runs. Returns the number of runs."""
    num_runs = 0
    for k in range(num_positions):
        token = own_token(context, source, positions[k])
        run = 0
        while run < num_runs and runs.token[run] != token:
            run += 1
        if run == num_runs:
            runs.token[run], runs.weight[run], runs.is_drafted[run] = token, 0.0, True
            num_runs += 1
        runs.weight[run] += 1.0
    return num_runs


@part
def list_pool_runs(runs, index, preference, num_samples, first, last, offset):
    """List the tokens `offset` tokens after the positions of an interval as runs, from samples if there are many.

    Returns the number of runs, the number of occurrences with a weight above 0 (the evidence, which group weights do
    not increase), and whether the whole interval was counted.
    """
    size = last - first
    num_runs, num_seen, is_counted = 0, 0.0, False
    if preference.outside > 0:
        num_seen = float(size)
        num_runs, is_counted = _list_all(runs, index, preference.outside, min(size, num_samples), first, size, offset)
        if num_runs == 1 and is_counted:  # the only next token takes the whole weight, whatever its groups
            return num_runs, num_seen, is_counted
    if preference.inside != preference.outside:
        num_runs, num_inside = _list_group(runs, num_runs, index, preference, num_samples, first, size, offset)
        if preference.outside <= 0:
            num_seen = num_inside
    return num_runs, num_seen, is_counted


@part
def _list_all(runs, index, weight, num_samples, first, size, offset):
    """List the runs of all groups. Returns their number, and whether the whole interval was counted."""
    runs.token[0] = index.tokens[index.order[first] + offset]
    runs.is_drafted[0] = is_supported(index, first, offset + 1)
    runs.begin[0] = 0
    if runs.token[0] == index.tokens[index.order[first + size - 1] + offset]:  # sorted: all between are equal too
        runs.weight[0], runs.end[0] = weight * size, size
        return 1, True
    scale = weight * (size / num_samples)
    stride = sample_stride(num_samples, size)
    if num_samples < size:  # in a large pool the samples are far from each other
        for k in range(num_samples):
            fetch(index.tokens, index.order[sample_place(first, stride, k)] + offset)
    run, is_counted = 0, num_samples == size
    last_token = index.tokens[index.order[sample_place(first, stride, 0)] + offset]
    for k in range(num_samples):  # every sample: their reads do not wait for one another, as a bisection's would
        token = index.tokens[index.order[sample_place(first, stride, k)] + offset]
        run += token != last_token  # added without a branch, which could not be predicted
        if run == NUM_RUNS:
            is_counted = False
            break
        runs.token[run], runs.end[run] = token, k + 1
        last_token = token
    num_runs, begin = min(run + 1, NUM_RUNS), 0
    for run in range(num_runs):
        end = runs.end[run]
        runs.begin[run], runs.weight[run] = begin, scale * (end - begin)
        runs.is_drafted[run] = is_supported(index, sample_place(first, stride, begin), offset + 1)
        begin = end
    return num_runs, is_counted


@part
def _list_group(runs, num_runs, index, preference, num_samples, first, size, offset):
    """Add the extra weight of the group's occurrences to the runs. Returns the number of runs, and of occurrences."""
    num_samples = min(size, num_samples if preference.outside > 0 else preference.num_samples)
    scale = size / num_samples
    weight = scale * (preference.inside - preference.outside)
    stride = sample_stride(num_samples, size)
    num_inside, run, end = 0, 0, num_runs  # runs up to `end` are sorted
    for k in range(num_samples):
        place = sample_place(first, stride, k)
        if not is_of_group(index, place, preference.group):
            continue
        num_inside += 1
        token = index.tokens[index.order[place] + offset]
        while run < end and runs.token[run] < token:
            run += 1
        target = run
        if run == end or runs.token[run] != token:  # a token that the samples of all texts missed
            target = num_runs - 1
            if num_runs == end or runs.token[target] != token:
                if num_runs == NUM_RUNS:
                    continue
                target = num_runs
                num_runs += 1
                runs.token[target], runs.weight[target] = token, 0.0
                runs.begin[target] = runs.end[target] = 0
                runs.is_drafted[target] = is_supported(index, place, offset + 1)
        runs.weight[target] += weight
    return num_runs, num_inside * scale
