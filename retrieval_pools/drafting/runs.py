"""What one level knows to follow: its next tokens and how much each counts.

In the pool an interval is sorted by what follows, so the occurrences of a token are a run.
"""

from laserbatch.retrieval_pools.compiled import fetch, part
from laserbatch.retrieval_pools.drafting.intervals import (
    is_of_group,
    is_supported,
    num_group_samples_behind,
    sample_place,
    sample_stride,
)
from laserbatch.retrieval_pools.drafting.own_texts import own_token
from laserbatch.retrieval_pools.drafting.state import NUM_RUNS


@part
def list_own_runs(runs, context, source, positions, num_positions):
    """The tokens at positions of an own text. Returns the number of runs."""
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
    """The tokens `offset` tokens behind the positions of an interval, sampled and weighted when they are many.

    Returns the number of runs, that of occurrences that count at all (the evidence, whose group does not make it more),
    and whether all of the interval was counted.
    """
    size = last - first
    num_runs, num_seen, is_counted = 0, 0.0, False
    if preference.outside > 0:
        num_seen = float(size)
        num_runs, is_counted = _list_all(runs, index, preference.outside, min(size, num_samples), first, size, offset)
        if num_runs == 1 and is_counted:  # whoever has it, it takes all
            return num_runs, num_seen, is_counted
    if preference.inside != preference.outside:
        num_runs, num_inside = _list_group(runs, num_runs, index, preference, num_samples, first, size, offset)
        if preference.outside <= 0:
            num_seen = num_inside
    return num_runs, num_seen, is_counted


@part
def _list_all(runs, index, weight, num_samples, first, size, offset):
    """Returns the number of runs, and whether they are all of the interval."""
    runs.token[0] = index.tokens[index.order[first] + offset]
    runs.is_drafted[0] = is_supported(index, first, offset + 1)
    runs.begin[0] = 0
    if runs.token[0] == index.tokens[index.order[first + size - 1] + offset]:  # sorted: so are those between
        runs.weight[0], runs.end[0] = weight * size, size
        return 1, True
    scale = weight * (size / num_samples)
    stride = sample_stride(num_samples, size)
    if num_samples < size:  # a large pool's: they are far from each other
        for k in range(num_samples):
            fetch(index.tokens, index.order[sample_place(first, stride, k)] + offset)
    run, is_counted = 0, num_samples == size
    last_token = index.tokens[index.order[sample_place(first, stride, 0)] + offset]
    for k in range(num_samples):  # all of them: they do not wait for one another, as those of a bisection would
        token = index.tokens[index.order[sample_place(first, stride, k)] + offset]
        run += token != last_token  # added, not asked: no branch could be foretold
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
    """Make the group's occurrences count more, one after the other. Returns the number of runs, and of occurrences."""
    num_samples = min(size, num_group_samples_behind(preference, num_samples))
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
        found = run
        if run == end or runs.token[run] != token:  # one that the samples of all texts do not have
            found = num_runs - 1
            if num_runs == end or runs.token[found] != token:
                if num_runs == NUM_RUNS:
                    continue
                found = num_runs
                num_runs += 1
                runs.token[found], runs.weight[found] = token, 0.0
                runs.begin[found] = runs.end[found] = 0
                runs.is_drafted[found] = is_supported(index, place, offset + 1)
        runs.weight[found] += weight
    return num_runs, num_inside * scale
