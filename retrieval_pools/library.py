"""Drafts for an engine of any kind: open a pool, route an entity, and draft for the texts that are being written.

The face of the package. An engine says what it is asked for (`start`), asks for the drafts of a step (`draft`), tells
what it kept of them (`accept`), and ends (`finish`). It may do so from several threads. docs/pools-library.md has an
example of each name.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from laserbatch.retrieval_pools.draft import Draft, DraftOptions, Drafts, draft_batch, int32_row
from laserbatch.retrieval_pools.drafting.state import MAX_NODES
from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.manifest import Side
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.store import PoolStore
from laserbatch.retrieval_pools.routing.router import Router

__all__ = ["Draft", "DraftBudget", "Drafts", "OpenPool", "PoolError", "open_pool"]


@dataclass(frozen=True)
class DraftBudget:
    """How much is drafted for each text.

    Parameters
    ----------
    max_tokens : at most so many tokens, 0 to 64.
    min_acceptance : no token whose path is estimated to be accepted less often, 0 to 1.
    form : "chain" for one path, the best by the sum of its tokens' probabilities, later ones counting less; "tree" for
        an engine that verifies several paths in one forward.
    """

    max_tokens: int = 8
    min_acceptance: float = 0.07
    form: Literal["chain", "tree"] = "chain"

    def __post_init__(self) -> None:
        if not (isinstance(self.max_tokens, Integral) and 0 <= self.max_tokens <= MAX_NODES):
            raise ValueError(f"max_tokens is {self.max_tokens}; a draft has 0 to {MAX_NODES} tokens")
        if not 0 <= self.min_acceptance <= 1:
            raise ValueError(f"min_acceptance is {self.min_acceptance}; it is a probability")
        if self.form not in ("chain", "tree"):
            raise ValueError(f"form is {self.form!r}; a draft is a 'chain' or a 'tree'")


def open_pool(
    root: Path | str, side: Side, version: str | None = None, *, tokenizer_hash: str | None = None
) -> "OpenPool":
    """Open what a night has left in its workspace's `pools/`.

    Parameters
    ----------
    root : that folder.
    side : "user" or "item".
    version : a version of it; None: the current one, which stays open when another one is published.
    tokenizer_hash : of the engine's tokenizer, by which the pool must have been built; None does not compare.

    Raises
    ------
    PoolError
        There is no such version or side, a file is damaged, or the pool is of another tokenizer.
    """
    store = PoolStore(Path(root))
    version = store.current_version() if version is None else version
    if version is None:
        raise PoolError(f"there are no pools in {root}: no night has left any yet")

    def opened(folder: Path) -> OpenPool:
        if not (folder / side).is_dir():
            raise PoolError(f"the pools {version!r} in {root} have none of the side {side!r}")
        pool, routers = Pool.open(folder / side, tokenizer_hash, verify=True), folder / "router"
        return OpenPool(pool, Router.load(routers / side) if routers.is_dir() else None, version)

    return store.read(version, opened, verify=True)


class OpenPool:
    """A pool and the texts that are being written from it. Every method may be called from several threads.

    Parameters
    ----------
    pool : what is drafted from beside a text's own prompt, output and previous text; None: from these alone.
    router : names an entity's group; None: `route` is not asked.
    version : of the pool, for logs.
    """

    def __init__(self, pool: Pool | None, router: Router | None = None, version: str = "") -> None:
        self.pool = pool
        self.router = router
        self.version = version
        self._texts: dict[Hashable, _Text] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many texts were started and are not finished."""
        return len(self._texts)

    def route(self, entity: Mapping[str, Any], num_interactions: int = 0) -> str:
        """The group whose texts an entity's drafts should prefer, for `start`. One always answers.

        Parameters
        ----------
        entity : its `user_id` or `item_id` and its attributes, by their names in the tables; what is missing or unknown
            makes the group a wider one.
        num_interactions : that it has by now.

        Raises
        ------
        PoolError
            The pool was opened without a router, or the entity has no id.
        """
        if self.router is None:
            raise PoolError("this pool was opened without a router")
        table = pa.Table.from_pylist([dict(entity)])
        return self.router.routes(table, np.array([num_interactions])).of(0).group

    def start(
        self,
        request: Hashable,
        prompt_ids: np.ndarray,
        previous_ids: np.ndarray | None = None,
        group: str | None = None,
    ) -> None:
        """A text is going to be written.

        Parameters
        ----------
        request : the engine's own name of it.
        prompt_ids : int[n], as the model is given it. Here and in `accept` an id below 0 is no token: it is never
            drafted, and matches nothing in the pool.
        previous_ids : int[m], the entity's text of an earlier night without its end token, or None.
        group : what `route` said, or None: all texts of the pool count the same.

        Raises
        ------
        ValueError
            A request of that name is not finished, the ids are not integers in one row, or the group is no text.
        """
        if not (group is None or isinstance(group, str)):
            raise ValueError(f"the group is {group!r}; expected the text that `route` returns, or None")
        text = _Text(_ids(prompt_ids), None if previous_ids is None else _ids(previous_ids), group)
        with self._lock:
            if request in self._texts:
                raise ValueError(f"the request {request!r} was started already, and is not finished")
            self._texts[request] = text

    def draft(self, requests: Sequence[Hashable], budget: DraftBudget | None = None, num_threads: int = 1) -> Drafts:
        """What each of the texts is likely to go on with. The same texts give the same drafts; frees the GIL.

        Parameters
        ----------
        requests : texts of a step, all of which were started.
        budget : None: that of `DraftBudget`'s defaults.
        num_threads : that share the work, the caller's among them.

        Returns
        -------
        A `Draft` for each, in the order of `requests`. Of a chain `token_ids` follow each other, of a tree `parents`
        says after which one each stands; `np.exp(log_acceptance)` is how likely the path to each is accepted.

        Raises
        ------
        KeyError
            A request that was not started, or is finished.
        """
        budget = budget or DraftBudget()
        with self._lock:
            texts = [self._texts[request] for request in requests]
            contexts = [text.context for text in texts]  # as they are now: what is accepted meanwhile stands behind
        return draft_batch(
            self.pool,
            contexts,
            [text.num_prompt for text in texts],
            [text.previous_ids for text in texts],
            [text.group for text in texts],
            options=DraftOptions(budget.max_tokens, budget.min_acceptance, as_chains=budget.form == "chain"),
            num_threads=num_threads,
        )

    def context(self, request: Hashable) -> np.ndarray:
        """The prompt of a text and what was accepted so far, int32[n]; KeyError as of `draft`."""
        with self._lock:
            return self._texts[request].context

    def accept(self, request: Hashable, token_ids: np.ndarray) -> None:
        """What a step added to a text: int[n], drafted tokens that were kept, then the model's own.

        Raises KeyError as `draft` does, ValueError where the ids are not integers in one row.
        """
        token_ids = _ids(token_ids)
        with self._lock:
            self._texts[request].append(token_ids)

    def finish(self, request: Hashable) -> np.ndarray:
        """Forget a text: nothing of it is drafted to others. Returns what was written of it, int32[n].

        Raises KeyError as `draft` does.
        """
        with self._lock:
            text = self._texts.pop(request)
        return text.context[text.num_prompt :]


class _Text:
    """A prompt and what follows it so far, in memory that doubles; a view of it stays what it is."""

    def __init__(self, prompt_ids: np.ndarray, previous_ids: np.ndarray | None, group: str | None) -> None:
        self.num_prompt = self._length = len(prompt_ids)
        self.previous_ids, self.group = previous_ids, group
        self._tokens = np.empty(max(2 * len(prompt_ids), 64), np.int32)
        self._tokens[: self._length] = prompt_ids

    @property
    def context(self) -> np.ndarray:
        return self._tokens[: self._length]

    def append(self, token_ids: np.ndarray) -> None:
        length = self._length + len(token_ids)
        if length > len(self._tokens):
            grown = np.empty(2 * length, np.int32)
            grown[: self._length] = self.context
            self._tokens = grown
        self._tokens[self._length : length] = token_ids
        self._length = length


def _ids(tokens: np.ndarray) -> np.ndarray:
    return int32_row(tokens).copy()
