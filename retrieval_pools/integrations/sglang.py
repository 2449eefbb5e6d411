"""Draft trees from pools inside SGLang: the speculative algorithm LASERBATCH, based on SGLang's n-gram worker.

SGLang finds `register` by the entry point `sglang.srt.plugins`. It verifies the drafts as it verifies its own n-grams:
as trees, and with acceptance thresholds if any are set. docs/sglang.md describes the use.
"""

import logging
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from laserbatch.retrieval_pools.integrations.vllm import ProposerSettings, started
from laserbatch.retrieval_pools.library import DraftBudget, OpenPool

logger = logging.getLogger(__name__)

NAME = "LASERBATCH"
PADDING = 0  # a child of the root, in place of missing nodes; the target may accept it like any other token


class Written(NamedTuple):
    """A text of a batch: SGLang's name for it, its prompt, its output, and the newest tokens not in the output yet."""

    name: Hashable
    prompt: Sequence[int]
    output: Sequence[int]
    newest: Sequence[int]


class PoolTrees:
    """Drafts the trees of a batch for SGLang's n-gram worker: all have one size, and the last written token as root.

    It takes the place of that worker's corpus, hence `erase_match_state` and `reset`. A failed draft counts as empty,
    is counted (`num_failed`) and logged once; it does not stop the batch.

    Parameters
    ----------
    model : folder with the tokenizer that the pools were built with.
    num_nodes : number of nodes of a tree, the root included.
    """

    def __init__(self, model: str, num_nodes: int) -> None:
        """Raises PoolError if a pool has another tokenizer, or a file that the settings name is missing."""
        settings = ProposerSettings.read()
        self._opened = [entry.open(model)[:2] for entry in settings]
        self._budget = DraftBudget(num_nodes - 1, settings[0].min_acceptance, "tree")
        self._num_nodes = num_nodes
        self._pool_of: dict[Hashable, OpenPool] = {}
        self.num_failed = 0

    def draft(self, texts: Sequence[Written]) -> tuple[np.ndarray, np.ndarray]:
        """The trees' tokens, int64[texts * nodes], and for each two nodes of a tree whether the second is the first or
        an ancestor of it, bool[texts * nodes * nodes]."""
        size = self._num_nodes
        tokens = np.full((len(texts), size), PADDING, np.int64)
        is_above = np.zeros((len(texts), size, size), bool)
        is_above[:] = np.eye(size, dtype=bool)
        is_above[:, :, 0] = True
        for row, text in enumerate(texts):
            tokens[row, 0] = (text.newest or text.output or text.prompt)[-1]
        try:
            for text in texts:
                self._follow(text)
            for row, text in enumerate(texts):
                (tree,) = self._pool_of[text.name].draft([text.name], self._budget)
                num = len(tree.token_ids)
                tokens[row, 1 : num + 1] = tree.token_ids
                for node, parent in enumerate(tree.parents.tolist(), 1):
                    is_above[row, node] |= is_above[row, parent + 1]
        except Exception:  # SGLang goes on without a draft, so a fault of ours does not lose a batch
            self.num_failed += 1
            if self.num_failed == 1:
                logger.exception("a draft failed: the step runs without it, and later failures are not logged")
        return tokens.ravel(), is_above.ravel()

    def erase_match_state(self, names: Iterable[Hashable]) -> None:
        """Forget texts that left the batch; a text that comes back is started anew."""
        for name in names:
            if (pools := self._pool_of.pop(name, None)) is not None:
                pools.finish(name)

    def reset(self) -> None:
        """Forget all texts."""
        self.erase_match_state(list(self._pool_of))

    def _follow(self, text: Written) -> None:
        """Start a text, or give its pool the tokens written since the last step."""
        length = len(text.prompt) + len(text.output) + len(text.newest)
        if (pools := self._pool_of.get(text.name)) is not None and len(pools.context(text.name)) > length:
            self.erase_match_state([text.name])
            pools = None
        if pools is None:
            pools = started(text.name, np.array(text.prompt, np.int32), self._opened)
            self._pool_of[text.name] = pools
        num_new = length - len(pools.context(text.name))
        written = [*text.output[max(0, len(text.output) - num_new) :], *text.newest]
        pools.accept(text.name, np.array(written[len(written) - num_new :], np.int32))


def written_of(batch: Any, num_nodes: int, is_overlapped: bool) -> list[Written]:
    """The texts of SGLang's batch. If steps overlap, `output_ids` does not have the last step's accepted tokens yet."""
    newest: list[list[int]] = [[] for _ in batch.reqs]
    if is_overlapped and not batch.grammar_needs_sync():
        tokens, lengths = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
        newest = [tokens[row * num_nodes : row * num_nodes + length] for row, length in enumerate(lengths)]
    return [
        Written(req.rid, req.origin_input_ids_unpadded, req.output_ids, tail)
        for req, tail in zip(batch.reqs, newest, strict=True)
    ]


@cache
def register() -> None:
    """Make `--speculative-algorithm LASERBATCH` known.

    SGLang calls it wherever both are installed, even if LASERBATCH is not used. If the version of SGLang takes no other
    algorithms, or takes them in another way, it logs a warning and leaves SGLang as it is.
    """
    try:
        _register()
    except Exception as error:  # an unknown version may raise anything
        logger.warning(
            "speculative algorithm %s is not available: this SGLang cannot add algorithms as 0.5.23 can (%s: %s)",
            NAME, type(error).__name__, error,
        )  # fmt: skip


def _register() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # pyright: ignore[reportMissingImports]
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo  # pyright: ignore[reportMissingImports]

    ngram = SpeculativeAlgorithm.NGRAM

    def as_ngram(name: str):
        return lambda self, *arguments, **options: getattr(ngram, name)(*arguments, **options)

    # In all but its drafts it behaves as SGLang's n-gram algorithm.
    alike = {
        name: as_ngram(name)
        for name, member in vars(SpeculativeAlgorithm).items()
        if callable(member) and not name.startswith("_") and name != "create_worker"
    }
    algorithm = type("PoolAlgorithm", (CustomSpecAlgo,), alike)
    SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=require_pools, spec_class=algorithm
    )(lambda server_args: worker_class())


def require_pools(server_args: Any) -> None:
    """Open all that drafts need before a model loads; PoolError if a part is missing or has another tokenizer."""
    for settings in ProposerSettings.read():
        if settings.step_cost is not None:
            logger.warning("step_cost %s is not used: with SGLang all trees have one size", settings.step_cost)
        settings.open(server_args.tokenizer_path or server_args.model_path)


def worker_class() -> type:
    """SGLang's n-gram worker with trees from pools; its module needs a GPU, so it is imported here."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # pyright: ignore[reportMissingImports]

    class PoolWorker(NGRAMWorker):
        def __init__(self, server_args: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(server_args, *arguments, **options)
            self.ngram_corpus = PoolTrees(server_args.tokenizer_path or server_args.model_path, self.draft_token_num)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.ngram_corpus.draft(written_of(batch, self.draft_token_num, self.enable_overlap))

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Does nothing: a pool never changes."""

    return PoolWorker
