"""Drafts for an engine of any kind: open a pool, route an entity, and draft for the texts that are being written.

This is the public interface of the package. An engine registers each text (`start`), asks for the drafts of a step
(`draft`), reports the tokens that the step added (`accept`), and ends the text (`finish`). It may do so from several
threads. docs/pools-library.md has an example of each name.
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
    """The size and form of the draft of each text.

    Parameters
    ----------
    max_tokens : the largest number of tokens in a draft, 0 to 64.
    min_acceptance : tokens whose path has a lower estimated probability of acceptance are not drafted; 0 to 1.
    form : "chain" for a single path: the one with the largest sum of its tokens' probabilities of acceptance, in which
        later tokens count less. "tree" for an engine that verifies several paths in one forward pass.
    """

    max_tokens: int = 8
    min_acceptance: float = 0.07
    form: Literal["chain", "tree"] = "chain"

    def __post_init__(self) -> None:
        if not (isinstance(self.max_tokens, Integral) and 0 <= self.max_tokens <= MAX_NODES):
            raise ValueError(f"max_tokens is {self.max_tokens}; expected a whole number from 0 to {MAX_NODES}")
        if not 0 <= self.min_acceptance <= 1:
            raise ValueError(f"min_acceptance is {self.min_acceptance}; expected a probability, 0 to 1")
        if self.form not in ("chain", "tree"):
            raise ValueError(f"form is {self.form!r}; expected 'chain' or 'tree'")


def open_pool(
    root: Path | str, side: Side, version: str | None = None, *, tokenizer_hash: str | None = None
) -> "OpenPool":
    """Open the pool of one side, and its router if it has one, from the `pools/` folder of a workspace.

    Parameters
    ----------
    root : the `pools/` folder.
    side : "user" or "item".
    version : the version to open; None: the current one, which stays open when another version is published.
    tokenizer_hash : hash of the engine's tokenizer, with which the pool must have been built; None: not compared.

    Raises
    ------
    PoolError
        There is no such version or side, a file is damaged, or the pool was built with another tokenizer.
    """
    store = PoolStore(Path(root))
    version = store.current_version() if version is None else version
    if version is None:
        raise PoolError(f"there are no pools in {root}; give the `pools` folder of a workspace after a night")

    def opened(folder: Path) -> OpenPool:
        if not (folder / side).is_dir():
            raise PoolError(f"the pools {version!r} in {root} have no pool of the side {side!r}")
        pool, routers = Pool.open(folder / side, tokenizer_hash, verify=True), folder / "router"
        return OpenPool(pool, Router.load(routers / side) if routers.is_dir() else None, version)

    return store.read(version, opened, verify=True)


class OpenPool:
    """A pool and the texts that are being written from it. Every method may be called from several threads.

    Parameters
    ----------
    pool : earlier texts to draft from, besides a text's own prompt, output and previous text; None: only from these.
    router : names an entity's group; None: `route` cannot be called.
    version : version of the pool, for logs.
    """

    def __init__(self, pool: Pool | None, router: Router | None = None, version: str = "") -> None:
        self.pool = pool
        self.router = router
        self.version = version
        self._texts: dict[Hashable, _Text] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of texts that were started and are not finished."""
        return len(self._texts)

    def route(self, entity: Mapping[str, Any], num_interactions: int = 0) -> str:
        """The group whose texts an entity's drafts should prefer, for `start`. Every entity gets a group.

        Parameters
        ----------
        entity : its `user_id` or `item_id` and its attributes, by their names in the tables; if attributes are missing
            or unknown, the group is a wider one.
        num_interactions : the number of its interactions so far.

        Raises
        ------
        PoolError
            The pool was opened without a router, or the entity has no id.
        """
        if self.router is None:
            raise PoolError("this pool has no router, so it routes nothing; call `start` without a group")
        table = pa.Table.from_pylist([dict(entity)])
        return self.router.routes(table, np.array([num_interactions])).of(0).group

    def start(
        self,
        request: Hashable,
        prompt_ids: np.ndarray,
        previous_ids: np.ndarray | None = None,
        group: str | None = None,
    ) -> None:
        """Register a text that is going to be written.

        Parameters
        ----------
        request : the engine's own name for the text.
        prompt_ids : int[n], the prompt as the model gets it. Here and in `accept` an id below 0 is not a token: it is
            never drafted, and matches nothing in the pool.
        previous_ids : int[m], the entity's text of an earlier night without its end token, or None.
        group : the result of `route`, or None: all texts of the pool count the same.

        Raises
        ------
        ValueError
            A request of that name is not finished, the ids are not integers in one row, or the group is not a string.
        """
        if not (group is None or isinstance(group, str)):
            raise ValueError(f"the group is {group!r}; expected the string that `route` returns, or None")
        text = _Text(_ids(prompt_ids), None if previous_ids is None else _ids(previous_ids), group)
        with self._lock:
            if request in self._texts:
                raise ValueError(f"the request {request!r} was started already and is not finished; use another name")
            self._texts[request] = text

    def draft(self, requests: Sequence[Hashable], budget: DraftBudget | None = None, num_threads: int = 1) -> Drafts:
        """Draft the likely next tokens of each text. The same texts give the same drafts; frees the GIL.

        Parameters
        ----------
        requests : the texts of a step; all must have been started.
        budget : None: the defaults of `DraftBudget`.
        num_threads : number of threads that share the work, the caller's included.

        Returns
        -------
        A `Draft` for each text, in the order of `requests`. The `token_ids` of a chain follow each other; in a tree,
        `parents` has the predecessor of each. `np.exp(log_acceptance)` is the probability that the path is accepted.

        Raises
        ------
        KeyError
            A request was not started, or is finished.
        """
        budget = budget or DraftBudget()
        with self._lock:
            texts = [self._texts[request] for request in requests]
            contexts = [text.context for text in texts]  # tokens that are accepted meanwhile come after these views
        of_texts = ([getattr(text, name) for text in texts] for name in ("num_prompt", "previous_ids", "group"))
        options = DraftOptions(budget.max_tokens, budget.min_acceptance, as_chains=budget.form == "chain")
        return draft_batch(self.pool, contexts, *of_texts, options=options, num_threads=num_threads)

    def context(self, request: Hashable) -> np.ndarray:
        """The prompt of a text and the tokens accepted so far, int32[n]. Raises KeyError as `draft` does."""
        with self._lock:
            return self._texts[request].context

    def accept(self, request: Hashable, token_ids: np.ndarray) -> None:
        """Append the tokens that a step added to a text: int[n], the accepted draft tokens, then the model's own.

        Raises KeyError as `draft` does, ValueError if the ids are not integers in one row.
        """
        token_ids = _ids(token_ids)
        with self._lock:
            self._texts[request].append(token_ids)

    def finish(self, request: Hashable) -> np.ndarray:
        """Forget a text; it is not drafted from for other texts. Returns its tokens without the prompt, int32[n].

        Raises KeyError as `draft` does.
        """
        with self._lock:
            text = self._texts.pop(request)
        return text.context[text.num_prompt :]


class _Text:
    """A prompt and the tokens after it, in a buffer that doubles when full; earlier views of it stay valid."""

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
