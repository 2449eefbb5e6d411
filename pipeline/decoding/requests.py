"""What the engine is asked for, and what it gives: requests, finished texts, failures, the events of steps."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GenerationRequest:
    """One text to write.

    Parameters
    ----------
    request_id : comes back with the result.
    prompt_ids : int32[n], n >= 1.
    previous_ids : int32[m], this entity's earlier text, to draft from; or None.
    group : name of the pool group to prefer, or None.
    max_new_tokens : limit of this text's tokens.
    """

    request_id: str
    prompt_ids: np.ndarray
    previous_ids: np.ndarray | None = None
    group: str | None = None
    max_new_tokens: int = 512


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    `token_ids` int32[k] without the end token; `text`, their decoded text, cut before a stop string (empty where the
    engine has no tokenizer); `sources` uint8[k], a code of `retrieval_pools.sources` a token;
    `finish_reason` "end_of_text", "stop" or "length". Of `num_drafted` draft tokens `num_accepted` became part of the
    text, by source int64[NUM_SOURCES] and by depth int64[MAX_DEPTH] (index 0 is depth 1). Tokens per step is
    `(num_accepted + num_steps) / num_steps`, the bonus token of each step counted.
    """

    request_id: str
    token_ids: np.ndarray
    sources: np.ndarray
    text: str
    finish_reason: str
    num_steps: int
    num_drafted: int
    num_accepted: int
    drafted_by_source: np.ndarray
    accepted_by_source: np.ndarray
    drafted_by_depth: np.ndarray
    accepted_by_depth: np.ndarray


@dataclass(frozen=True)
class GenerationFailure:
    """A request that could not be done; `reason` begins with a stable word ("too-long", "bad-token", ...)."""

    request_id: str
    reason: str


@dataclass(frozen=True)
class StepEvent:
    """What one step added to one text: int32[a] tokens and their sources, of `num_drafted` drafted.

    `is_last` : the text has ended, though a stop string may cut it before these tokens.
    """

    request_id: str
    token_ids: np.ndarray
    sources: np.ndarray
    num_drafted: int
    is_last: bool = False
