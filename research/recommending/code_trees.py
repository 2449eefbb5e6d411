"""Trees of codes below users' prompts in one KV cache: a forward adds nodes to all trees, and each node attends to its
prompt and its ancestors (tree attention: Miao et al., ASPLOS 2024, section 4.2)."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from laserbatch.research.recommending.item_trie import ItemTrie, Path

ROOT: Path = ()
BROKEN = -1e30  # replaces log probabilities that are NaN, so that the search ends and scores show it


class CodeTrees:
    """Computes a model's log probabilities of codes after paths, for several users.

    Code c of level j is the model's token `first_tokens[j] + c`. Each of `prompts` is int64[n] token ids, at least one.
    """

    def __init__(
        self, model: PreTrainedModel, trie: ItemTrie, first_tokens: Sequence[int], prompts: Sequence[np.ndarray]
    ) -> None:
        self._model, self._trie, self._first_tokens = model, trie, first_tokens
        self._prompts = prompts
        self._cache = DynamicCache()
        longest = max(map(len, prompts))
        self._is_prompt = np.arange(longest) >= longest - np.array([len(prompt) for prompt in prompts])[:, None]
        self._places: list[dict[Path, int]] = [{} for _ in prompts]  # index of each path among a user's nodes
        self._above = np.zeros((len(prompts), 0, 0), bool)  # ancestors of each node, itself included
        self._log_p: list[dict[Path, np.ndarray]] = [{} for _ in prompts]
        self.num_forwards = self.num_tokens = 0  # tokens of prompts and paths, without padding

    def log_p(self, user: int, path: Path, node: int) -> np.ndarray | None:
        """Log probabilities float32[width] of the codes after a path, as in `ItemTrie.codes`; None if not computed.

        If only one code may follow, it is certain and needs no forward.
        """
        log_p = self._log_p[user].get(path)
        if log_p is None and self._trie.num_children[len(path)][node] == 1:
            return np.where(self._trie.codes[len(path)][node] >= 0, 0.0, -np.inf)
        return log_p

    def add(self, requested: Sequence[Sequence[tuple[Path, int]]]) -> None:
        """Compute the log probabilities after paths, given with their nodes of the trie, for all users in one forward.

        Known paths are not computed again; a path's prefixes must be known, or come earlier in the list.
        """
        new = [[pair for pair in dict(pairs).items() if pair[0] not in log_p and self._needs_forward(*pair)]
               for pairs, log_p in zip(requested, self._log_p, strict=True)]  # fmt: skip
        is_first = self._cache.get_seq_length() == 0
        num_new = max(map(len, new))
        if num_new == 0 and not is_first:
            return
        logits = self._forward(new, num_new, is_first)
        rows: list[list[tuple[int, int, Path, int]]] = [[] for _ in range(self._trie.num_levels)]  # by level
        for user, pairs in enumerate(new):
            if is_first:
                rows[0].append((user, 0, ROOT, 0))
            for place, (path, node) in enumerate(pairs, int(is_first)):
                rows[len(path)].append((user, place, path, node))
        for level, placed in enumerate(rows):
            if placed:
                users, places, paths, nodes = zip(*placed, strict=True)
                codes = self._trie.codes[level][list(nodes)]
                tokens = torch.from_numpy(np.maximum(codes, 0) + self._first_tokens[level]).to(logits.device)
                index = torch.tensor([users, places]).to(logits.device)
                scores = logits[index[0], index[1]].float().gather(1, tokens)
                is_none = torch.from_numpy(codes < 0).to(logits.device)
                log_p = torch.log_softmax(scores.masked_fill(is_none, -torch.inf), -1)
                log_p = log_p.nan_to_num(BROKEN, neginf=-torch.inf).masked_fill(is_none, -torch.inf)
                for user, path, row in zip(users, paths, log_p.cpu().numpy(), strict=True):
                    self._log_p[user][path] = row

    def _needs_forward(self, path: Path, node: int) -> bool:
        """Whether a path needs a forward: not the root, where prompts end, and not a path with a single item below."""
        level = len(path)
        return level > 0 and not (level == self._trie.num_levels - 1 and self._trie.num_children[level][node] == 1)

    @torch.inference_mode()
    def _forward(self, new: list[list[tuple[Path, int]]], num_new: int, is_first: bool) -> torch.Tensor:
        """Logits (num_users, num_new, vocab_size) of new nodes; the first forward puts the logits after the prompts in
        front."""
        num_users, longest = self._is_prompt.shape
        before = self._above.shape[1]
        above = np.zeros((num_users, before + num_new, before + num_new), bool)
        above[:, np.arange(before + num_new), np.arange(before + num_new)] = True  # padding attends to itself
        above[:, :before, :before] = self._above
        tokens, depths = np.zeros((num_users, num_new), np.int64), np.zeros((num_users, num_new), np.int64)
        for user, pairs in enumerate(new):
            for place, (path, _) in enumerate(pairs, before):
                level = len(path) - 1
                if level > 0:
                    above[user, place] |= above[user, self._places[user][path[:level]]]
                self._places[user][path] = place
                tokens[user, place - before] = self._first_tokens[level] + path[level]
                depths[user, place - before] = level
        self._above = above
        lengths = self._is_prompt.sum(1, keepdims=True)
        prompts = np.broadcast_to(self._is_prompt[:, None], (num_users, num_new, longest))
        seen, positions = np.concatenate((prompts, above[:, before:]), 2), lengths + depths
        if is_first:
            ids = np.zeros((num_users, longest), np.int64)
            ids[self._is_prompt] = np.concatenate(self._prompts)
            of_prompts = self._is_prompt[:, None] & np.tri(longest, dtype=bool)
            of_prompts[:, np.arange(longest), np.arange(longest)] = True
            of_prompts = np.concatenate((of_prompts, np.zeros((num_users, longest, num_new), bool)), 2)
            seen = np.concatenate((of_prompts, seen), 1)
            positions = np.concatenate((np.maximum(self._is_prompt.cumsum(1) - 1, 0), positions), 1)
            tokens = np.concatenate((ids, tokens), 1)
        device, dtype = self._model.device, self._model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(torch.from_numpy(~seen).to(device), torch.finfo(dtype).min)
        self.num_forwards += 1
        self.num_tokens += sum(map(len, new)) + (int(self._is_prompt.sum()) if is_first else 0)
        input_ids, position_ids = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        return self._model(
            input_ids=input_ids, attention_mask=mask[:, None], position_ids=position_ids, use_cache=True,
            past_key_values=self._cache, logits_to_keep=num_new + int(is_first),
        ).logits  # fmt: skip
