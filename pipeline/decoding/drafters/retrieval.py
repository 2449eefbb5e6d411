"""Drafts from texts that were written before (LASER; SuffixDecoding)."""

from laserbatch.pipeline.decoding.drafters.drafter import Drafter
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import MAX_DEPTH, TokenTree, TreeBatch


class RetrievalDrafter(Drafter):
    """Proposes continuations from a pool, the entity's previous text, its prompt and output (LASER; SuffixDecoding).

    Parameters
    ----------
    pool : `retrieval_pools` pool, or None to draft from the sequence's own text alone.
    sources : which of "previous", "prompt", "output", "pool" may be drafted from.
    max_nodes, min_acceptance : limits on a draft's tokens, and on the estimated acceptance of a node's path.
    num_threads : threads that draft in parallel (`Engine.num_draft_threads` says how many are worth while).
    """

    def __init__(
        self,
        pool=None,
        sources: tuple[str, ...] = ("previous", "prompt", "output", "pool"),
        max_nodes: int = 16,
        min_acceptance: float = 0.07,
        num_threads: int = 1,
    ) -> None:
        from laserbatch.retrieval_pools.draft import DraftOptions, draft_batch  # compiled; plain decoding goes without

        self._draft_batch = draft_batch
        self._pool = pool if "pool" in sources else None
        request_sources = ("prompt" in sources, "output" in sources, "previous" in sources)
        self._options, self._num_threads = DraftOptions(max_nodes, min_acceptance, *request_sources), num_threads

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        return self.draft_all([sequence], [MAX_DEPTH])[0]

    def draft_all(self, sequences: list[DecodingSequence], max_depths: list[int]) -> TreeBatch:
        drafts = self._draft_batch(
            self._pool,
            [sequence.context for sequence in sequences],
            [sequence.num_prompt for sequence in sequences],
            [sequence.previous_ids for sequence in sequences],
            [sequence.group for sequence in sequences],
            max_depths,
            self._options,
            self._num_threads,
        )
        return TreeBatch(*drafts.joined())
