"""EAGLE's head: one decoder layer that continues from the target's features (Li et al., ICML 2024, section 3).

A feature is the target's last hidden state, which its output layer reads. The head takes the feature of a token and the
embedding of the next token, and predicts the next token's feature; deeper draft tokens build on its own predictions.
HASS (Zhang et al., ICLR 2025) trains the same head. Of a prompt, the head uses only the last token's feature, since the
features of a shared prefix are not computed for each prompt.
"""

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from laserbatch.pipeline.decoding.attention.interface import ATTENTION_NAME
from laserbatch.pipeline.decoding.batch import Feed
from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.drafter import Observation
from laserbatch.pipeline.decoding.model.cuda_graphs import TOKEN_BUCKETS
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.research.drafters.model_drafter import CachedModel


class EagleHead(nn.Module):
    """Predicts the features of next tokens from the features of tokens and the embeddings of the next tokens.

    `config` : the configuration of a Llama with one layer; `config._attn_implementation` names the attention.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.join = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.register_module("input_layernorm", nn.Identity())  # as in EAGLE
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """`embeddings`, `features` and the result are (batch, num_tokens, hidden_size), positions (1, num_tokens)."""
        hidden = self.join(torch.cat((embeddings, features), -1))
        output = self.layer(hidden, position_embeddings=self.rotary(hidden, position_ids), position_ids=position_ids)
        return output if isinstance(output, torch.Tensor) else output[0]


class _PackedHead:
    """A head with the two parts that `ModelRunner` calls: hidden states, and their logits.

    `take` sets the features of a forward's tokens in advance. If the forward may be captured as a CUDA graph, they go
    to one buffer, which a replay reads. Results of padding are never used.
    """

    def __init__(self, head: EagleHead, embed, logits_of) -> None:
        head.config._attn_implementation = ATTENTION_NAME
        self._head, self._embed, self.logits_of = head, embed, logits_of
        self._features = self._static = head.join.weight.new_zeros(TOKEN_BUCKETS[-1], head.config.hidden_size)

    def take(self, features: torch.Tensor) -> None:
        """Set the features of the next forward's tokens: (num_tokens, hidden_size)."""
        self._features = features
        if len(features) <= len(self._static):
            self._static[: len(features)] = features
            self._features = self._static

    def hidden_of(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The next tokens' features, (num_tokens, hidden_size), for ids (1, num_tokens), which include padding."""
        features = self._features[None, : token_ids.shape[1]]
        return self._head(self._embed(token_ids), features, position_ids)[0]


class EagleModel(CachedModel):
    """An EAGLE head and its KV cache, as a draft model.

    `embed` and `logits_of` are the target's layers: token ids int64[n] to (n, hidden_size), that to (n, vocab_size).
    """

    observes = "decode"

    def __init__(
        self, head: EagleHead, embed, logits_of, max_rows: int, max_tokens: int, log_acceptance, attention: str
    ) -> None:
        self._packed = _PackedHead(head, embed, logits_of)
        super().__init__(self._packed, head.join.weight.device, max_rows, max_tokens, log_acceptance, attention)
        self._seen: dict[DecodingSequence, list[torch.Tensor]] = {}  # features that are not in the cache yet

    def has_room(self, sequence: DecodingSequence) -> bool:
        new = sequence.context[-1:], sequence.num_left
        return sequence in self._seen and self._has_row(sequence, *new, shares=False)

    def begin(self, sequences: list[DecodingSequence]) -> None:
        seen = [torch.cat(self._seen[sequence]) for sequence in sequences]
        pairs = zip(sequences, seen, strict=True)
        feeds = [Feed(self._rows[sequence], sequence.context[-len(new) :]) for sequence, new in pairs]
        self._packed.take(torch.cat(seen))
        output = self._read(feeds)
        self._last = torch.stack([new[-1] for new in seen])
        for sequence, last in zip(sequences, self._last, strict=True):
            self._seen[sequence] = [last[None]]
        self._features = output.rows.hidden[to_device(output.batch.logit_indices, self._last.device)]
        self._rows_of_trees = np.arange(len(sequences))
        self._root = output.rows.of(np.arange(len(sequences)))

    def log_q(self, trees: TreeBatch, tree_of: np.ndarray, places: np.ndarray) -> torch.Tensor:
        if len(trees) == 0:
            return torch.log_softmax(self._root[to_device(tree_of, self._root.device)].float(), -1)
        # A forward has for each tree the last token, then the nodes; a node takes the feature of its parent.
        roots = trees.starts + np.arange(trees.num_trees)
        features = self._last.new_empty(len(trees) + trees.num_trees, self._last.shape[1])
        device = features.device
        features[to_device(roots, device)] = self._last
        parents = self._rows_of_trees[trees.tree_of] + 1 + trees.parents
        nodes = np.arange(len(trees)) + trees.tree_of + 1
        features[to_device(nodes, device)] = self._features[to_device(parents, device)]
        self._packed.take(features)
        output = self._runner.forward(self._feeds, trees)
        self._features, self._rows_of_trees = output.rows.hidden, roots
        return torch.log_softmax(output.rows.of(roots[tree_of] + 1 + places).float(), -1)

    @torch.inference_mode()
    def observe(self, observation: Observation) -> None:
        ends = np.searchsorted(observation.sequence_of, np.arange(len(observation.sequences) + 1))
        for sequence, start, end in zip(observation.sequences, ends[:-1], ends[1:], strict=True):
            seen = self._seen.get(sequence, [])
            num_seen = sum(map(len, seen))
            if sequence in self._rows:
                num_seen += int(self._cache.lengths[self._rows[sequence]])
            new = start + np.flatnonzero(observation.positions[start:end] >= sequence.num_prompt - 1 + num_seen)
            if len(new):
                self._seen[sequence] = [*seen, observation.hidden[to_device(new, observation.hidden.device)]]

    def forget(self, sequence: DecodingSequence) -> None:
        self._seen.pop(sequence, None)
        super().forget(sequence)
