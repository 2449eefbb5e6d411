"""Trees from pools inside SGLang: a speculative algorithm of its own, LASERBATCH, over its n-gram worker.

SGLang finds `register` by the entry point `sglang.srt.plugins` and verifies what is drafted as it does its own n-grams:
trees, and acceptance thresholds where it is told any. docs/sglang.md says how it is used.
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
PADDING = 0  # a token below the root where a tree is smaller: the target may choose it as any other


class Written(NamedTuple):
    """A text of a batch: SGLang's name of it, its prompt, what is written of it, and tokens that came after that."""

    name: Hashable
    prompt: Sequence[int]
    output: Sequence[int]
    newest: Sequence[int]


class PoolTrees:
    """The trees of a batch, as SGLang's n-gram worker wants them: all of one size, the last token written as the root.

    It stands where that worker has its corpus, hence `erase_match_state` and `reset`. A draft that fails is none, is
    counted (`num_failed`) and logged once; it stops no batch.

    Parameters
    ----------
    model : folder with the tokenizer that the pools were built by.
    num_nodes : of a tree, the root among them.
    """

    def __init__(self, model: str, num_nodes: int) -> None:
        """Raises PoolError: the pool is of another tokenizer, or anything of the settings is not there."""
        settings = ProposerSettings.read()
        self._opened = [entry.open(model)[:2] for entry in settings]
        self._budget = DraftBudget(num_nodes - 1, settings[0].min_acceptance, "tree")
        self._num_nodes = num_nodes
        self._pool_of: dict[Hashable, OpenPool] = {}
        self.num_failed = 0

    def draft(self, texts: Sequence[Written]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64[texts * nodes], and for each two nodes of a tree whether the second is above the first or the
        first itself, bool[texts * nodes * nodes]."""
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
        except Exception:  # SGLang goes on without a draft, and a batch is not lost for a fault of ours
            self.num_failed += 1
            if self.num_failed == 1:
                logger.exception("a draft failed: this step goes on without, and no other failure is logged")
        return tokens.ravel(), is_above.ravel()

    def erase_match_state(self, names: Iterable[Hashable]) -> None:
        """Texts that left the batch; one that comes back is begun anew."""
        for name in names:
            if (pools := self._pool_of.pop(name, None)) is not None:
                pools.finish(name)

    def reset(self) -> None:
        """Forget all texts."""
        self.erase_match_state(list(self._pool_of))

    def _follow(self, text: Written) -> None:
        """Begin a text, or tell its pool what has been written since."""
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
    """The texts of SGLang's batch. Where steps overlap, what the last one accepted is not in `output_ids` yet."""
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

    SGLang calls it wherever both are installed, whether or not anybody asked for LASERBATCH: with a version that takes
    no algorithms of others, or takes them otherwise, it logs a warning and leaves SGLang as it is.
    """
    try:
        _register()
    except Exception as error:  # a version that nobody has seen may raise anything
        logger.warning(
            "speculative algorithm %s is not available: this SGLang takes none as 0.5.23 does (%s: %s)",
            NAME, type(error).__name__, error,
        )  # fmt: skip


def _register() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # pyright: ignore[reportMissingImports]
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo  # pyright: ignore[reportMissingImports]

    ngram = SpeculativeAlgorithm.NGRAM

    def as_ngram(name: str):
        return lambda self, *arguments, **options: getattr(ngram, name)(*arguments, **options)

    # In all but its drafts it is SGLang's n-gram algorithm, whatever is asked of it.
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
    """Look at all that drafts need before a model loads. Raises PoolError: what is missing, or of another tokenizer."""
    for settings in ProposerSettings.read():
        settings.open(server_args.tokenizer_path or server_args.model_path)


def worker_class() -> type:
    """SGLang's n-gram worker with trees from pools; its module wants a GPU, so it is imported here."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker  # pyright: ignore[reportMissingImports]

    class PoolWorker(NGRAMWorker):
        def __init__(self, server_args: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(server_args, *arguments, **options)
            self.ngram_corpus = PoolTrees(server_args.tokenizer_path or server_args.model_path, self.draft_token_num)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.ngram_corpus.draft(written_of(batch, self.draft_token_num, self.enable_overlap))

        def _update_ngram_corpus(self, batch: Any) -> None:
            """A pool stays what it is."""

    return PoolWorker
