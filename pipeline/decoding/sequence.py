"""The request for a text, the sequence while it is written, and its result."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from laserbatch.retrieval_pools.sources import NUM_SOURCES, SOURCE_FORM, SOURCE_TARGET

if TYPE_CHECKING:
    from laserbatch.pipeline.decoding.grammar import Guide, ThoughtMarks

MAX_FORCED = 64  # most tokens that a grammar appends between two steps
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one text.

    Parameters
    ----------
    request_id : returned with the result.
    prompt_ids : int32[n], n >= 1.
    previous_ids : int32[m], this entity's earlier text, to draft from; or None.
    group : name of the pool group to prefer, or None.
    max_new_tokens : limit of this text's tokens.
    seed : int64, seeds the random numbers of a sampled text.
    grammar : the grammar of allowed texts, in llguidance's variant of Lark; None: any text.
    messages : the role and content of each message of the prompt, for servers that take no tokens.
    thoughts : the marks of thoughts, which may come before the text that the grammar allows; None: no thoughts.
    """

    request_id: str
    prompt_ids: np.ndarray
    previous_ids: np.ndarray | None = None
    group: str | None = None
    max_new_tokens: int = 512
    seed: int = 0
    grammar: str | None = None
    messages: tuple[tuple[str, str], ...] = ()
    thoughts: "ThoughtMarks | None" = None


@dataclass(frozen=True)
class GenerationResult:
    """A finished text.

    `token_ids` int32[k] has no end token; `text` is its decoded form (empty if the engine has no tokenizer); `sources`
    uint8[k] has a code of `retrieval_pools.sources` per token; `finish_reason` is "end_of_text" or "length".
    `num_accepted` of `num_drafted` draft tokens became part of the text; the arrays int64[NUM_SOURCES] count both by
    source. Tokens per step is `(num_accepted + num_steps) / num_steps`, with the bonus token of each step; a server's
    text has `num_steps` 0. `end_id` is the end token, None at the limit or if a server does not report it.
    `num_prompt_reused` of the prompt's `num_prompt` tokens were already in the KV cache.

    If `engines.answers` cuts a text at a role mark, `finish_reason` is "role_mark", `role_mark` is the mark, and
    `num_invented` counts the tokens after it. If it cuts `num_thought_tokens` as thoughts, `uncut` holds the tokens and
    their sources with the thoughts. If thoughts do not end, `finish_reason` is "unclosed_thoughts" and nothing is cut.
    """

    request_id: str
    token_ids: np.ndarray
    sources: np.ndarray
    text: str
    finish_reason: str
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by_source: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SOURCES, np.int64))
    accepted_by_source: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SOURCES, np.int64))
    end_id: int | None = None
    role_mark: str = ""
    num_invented: int = 0
    num_thought_tokens: int = 0
    num_prompt: int = 0
    num_prompt_reused: int = 0
    uncut: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def written(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32[n] and sources uint8[n] with the thoughts; later texts are drafted from these."""
        return self.uncut or (self.token_ids, self.sources)


@dataclass(frozen=True)
class GenerationFailure:
    """A request that yielded no text; `reason` begins with a stable word ("too-long", "bad-token", ...)."""

    request_id: str
    reason: str


Outcome = GenerationResult | GenerationFailure


class DecodingSequence:
    """A text being written. Drafters read `prompt_ids`, `output_ids`, `context`, `previous_ids` and `group`."""

    def __init__(self, request: GenerationRequest, max_new_tokens: int) -> None:
        self.request = request
        self.previous_ids, self.group = request.previous_ids, request.group
        self.num_prompt = len(request.prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.row = -1  # its row of the KV cache, once it is live
        self.order = -1  # its place in the order of requests
        self.end_id: int | None = None  # the token that ended it
        self.guide: Guide | None = None  # the state of its grammar, once it is live
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self.num_prompt_reused = 0  # prompt tokens that were in the KV cache when it got a row
        self._drafted = [_NOTHING]  # the sources of each draft's tokens
        self._tokens = np.empty(self.num_prompt + max_new_tokens, np.int32)
        self._tokens[: self.num_prompt] = request.prompt_ids
        self._read_only = self._tokens.view()  # a drafter of another package cannot change a text
        self._read_only.flags.writeable = False
        self._sources = np.empty(max_new_tokens, np.uint8)
        self.length = self.num_prompt

    @property
    def context(self) -> np.ndarray:
        """Read-only int32 view: prompt, then output so far."""
        return self._read_only[: self.length]

    @property
    def prompt_ids(self) -> np.ndarray:
        return self._read_only[: self.num_prompt]

    @property
    def output_ids(self) -> np.ndarray:
        return self._read_only[self.num_prompt : self.length]

    @property
    def sources(self) -> np.ndarray:
        """uint8 view: where each output token came from."""
        return self._sources[: self.length - self.num_prompt]

    @property
    def num_output(self) -> int:
        return self.length - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that may still be written."""
        return self.max_new_tokens - (self.length - self.num_prompt)

    def append(
        self, token_ids: np.ndarray, sources: np.ndarray, next_token: int | None, drafted: np.ndarray = _NOTHING
    ) -> None:
        """Commit a step: the tokens and sources [n] of the accepted path, and `next_token` unless it is None.

        `drafted` uint8[num_drafted] : the sources of all drafted tokens.
        """
        if len(drafted):
            self._drafted.append(drafted)
            self.num_drafted += len(drafted)
            self.num_accepted += len(token_ids)
        end = self.length + len(token_ids)
        if len(token_ids):
            self._tokens[self.length : end] = token_ids
            self._sources[self.length - self.num_prompt : end - self.num_prompt] = sources
        if next_token is not None:
            self._tokens[end] = next_token
            self._sources[end - self.num_prompt] = SOURCE_TARGET
            end += 1
        self.length = end
        self.num_steps += 1

    def append_forced(self, token_ids: list[int]) -> None:
        """Append tokens that the grammar forces, without a step; they count as accepted draft tokens."""
        if token_ids:
            sources = np.full(len(token_ids), SOURCE_FORM, np.uint8)
            self.append(np.array(token_ids, np.int32), sources, None, sources)
            self.num_steps -= 1

    def result(self, finish_reason: str, text: str) -> GenerationResult:
        """The finished text, whose output tokens decode to `text`."""
        accepted = self.sources[self.sources != SOURCE_TARGET]
        drafted_by_source, accepted_by_source = (
            np.bincount(codes, minlength=NUM_SOURCES) for codes in (np.concatenate(self._drafted), accepted)
        )
        return GenerationResult(
            request_id=self.request.request_id, token_ids=self.output_ids.copy(), sources=self.sources.copy(),
            text=text, finish_reason=finish_reason, num_steps=self.num_steps, num_drafted=self.num_drafted,
            num_accepted=self.num_accepted, drafted_by_source=drafted_by_source, accepted_by_source=accepted_by_source,
            end_id=self.end_id, num_prompt=self.num_prompt, num_prompt_reused=self.num_prompt_reused,
        )  # fmt: skip
