"""A stream worked on in several threads, its results in its order: so they depend on no thread.

Only what runs without the GIL gains by it: compiled code, checksums, the disk. Knows nothing of what is worked on.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MAX_THREADS = 2  # of each step of a build; what each has in hand is in memory, and the reader is one thread

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`map`, ahead of who reads it by one result a thread and no more: that much is in memory beside what is read.

    Items are taken by the reader's thread, when it asks for a result. An error of the function is raised in the place
    of its result. Where the process may use one core only, this is `map`.
    """
    num_threads = min(_num_usable_cores(), MAX_THREADS)
    if num_threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pool-build") as threads:
        underway = deque()
        for item in items:
            underway.append(threads.submit(function, item))
            if len(underway) > num_threads:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
