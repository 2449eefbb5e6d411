"""Drafts from the context, with the target's alternatives to it (AASD: Wang et al. 2025, sections 3.1 and 3.2).

The prefill of a prompt gives the target's distribution at each position. Up to two tokens that are more likely there
than the prompt's token are stored, and drafted as its alternatives.
"""

import numpy as np
import torch

from laserbatch.pipeline.decoding.device_memory import to_device
from laserbatch.pipeline.decoding.drafters.drafter import Drafter, Observation
from laserbatch.pipeline.decoding.sequence import DecodingSequence
from laserbatch.pipeline.decoding.token_tree import ROOT, TokenTree
from laserbatch.retrieval_pools.sources import SOURCE_ALIGNED, SOURCE_OUTPUT, SOURCE_PROMPT

MAX_KEY_TOKENS = 6  # maximum length of the suffix that is looked up
LENGTH = 6  # tokens of an n-gram that is drafted
MAX_NGRAMS = 3
MAX_ALTERNATIVES = 2
# Estimated acceptance of a token after 1, 2, ... matching tokens, and of an alternative.
ACCEPTANCE, OF_ALTERNATIVE = (0.3, 0.45, 0.6, 0.7, 0.8, 0.85), 0.3
ROWS_AT_ONCE = 256


class AlignedDrafter(Drafter):
    """Drafts n-grams of the context after the longest matching suffix; tokens of the prompt come with alternatives."""

    observes = "prefill"

    def __init__(self) -> None:
        self._alternatives: dict[DecodingSequence, np.ndarray] = {}  # int32 (num_prompt, MAX_ALTERNATIVES), -1 for none

    def draft(self, sequence: DecodingSequence) -> TokenTree:
        context, alternatives = sequence.context, self._alternatives.get(sequence)
        tree: dict[tuple[int, int], int] = {}
        columns: list[tuple[int, int, float, int]] = []  # token, parent, log acceptance, source

        def add(parent: int, token: int, acceptance: float, source: int) -> int:
            place = tree.setdefault((parent, token), len(columns))
            if place == len(columns):
                above = columns[parent][2] if parent != ROOT else 0.0
                columns.append((token, parent, above + float(np.log(acceptance)), source))
            return place

        starts, num_alike = ngrams_behind(context)
        for start in starts:
            parent = ROOT
            for depth, place in enumerate(range(start, min(start + LENGTH, len(context)))):
                is_prompt = place < sequence.num_prompt
                if is_prompt and alternatives is not None:
                    for token in alternatives[place][alternatives[place] >= 0].tolist():
                        add(parent, token, OF_ALTERNATIVE, SOURCE_ALIGNED)
                acceptance = ACCEPTANCE[min(num_alike + depth, len(ACCEPTANCE)) - 1]
                source = SOURCE_PROMPT if is_prompt else SOURCE_OUTPUT
                parent = add(parent, int(context[place]), acceptance, source)
        tokens, parents, acceptances, sources = zip(*columns, strict=True) if columns else ((), (), (), ())
        arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(acceptances, np.float32)
        return TokenTree(*arrays, np.array(sources, np.uint8))

    @torch.inference_mode()
    def observe(self, observation: Observation) -> None:
        """Store the alternatives to prompt tokens from the hidden states of a step."""
        of_prompt = np.array([sequence.num_prompt for sequence in observation.sequences])[observation.sequence_of]
        seen = np.flatnonzero(observation.positions < of_prompt - 1)
        for first in range(0, len(seen), ROWS_AT_ONCE):
            part = seen[first : first + ROWS_AT_ONCE]
            logits = observation.rows.head.logits_of(observation.hidden[to_device(part, observation.hidden.device)])
            best = logits.topk(MAX_ALTERNATIVES, -1)
            sequences, places = observation.sequence_of[part], observation.positions[part] + 1
            prompt_tokens = [int(observation.sequences[i].context[k]) for i, k in zip(sequences, places, strict=True)]
            least = logits.gather(1, to_device(np.array(prompt_tokens), logits.device)[:, None])
            sooner = torch.where(best.values > least, best.indices, -1).cpu().numpy()
            for i, place, tokens in zip(sequences.tolist(), places.tolist(), sooner, strict=True):
                sequence = observation.sequences[i]
                none = np.full((sequence.num_prompt, MAX_ALTERNATIVES), -1, np.int32)
                self._alternatives.setdefault(sequence, none)[place] = tokens

    def forget(self, sequence: DecodingSequence) -> None:
        self._alternatives.pop(sequence, None)


def ngrams_behind(context: np.ndarray) -> tuple[list[int], int]:
    """The starts of the last MAX_NGRAMS n-grams after the longest repeated suffix of the context, the newest first.

    The second result is the length of that suffix, MAX_KEY_TOKENS at most.
    """
    ends = np.flatnonzero(context[:-1] == context[-1])  # where earlier occurrences of the suffix end
    num_alike = 1
    while num_alike < min(MAX_KEY_TOKENS, len(context) - 1):
        longer = ends[ends >= num_alike]
        longer = longer[context[longer - num_alike] == context[-1 - num_alike]]
        if len(longer) == 0:
            break
        ends, num_alike = longer, num_alike + 1
    return (ends[::-1][:MAX_NGRAMS] + 1).tolist(), num_alike
