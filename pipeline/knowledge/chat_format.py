"""Token ids of chat messages, such that no content ever becomes a control token.

The chat template is rendered with sentinels in place of the contents and split at them: the text in between is the
skeleton, whose control tokens are intended. Skeleton and contents are tokenised together, which gives the tokens of
`apply_chat_template`, even if a tokenizer treats the beginning of a text specially. If the result has other control
tokens than the skeleton, contents are tokenised separately, as plain text. Without a chat template, the prompt is the
contents as plain text after the tokenizer's begin-of-text token.
"""

import datetime
import json
import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from laserbatch.pipeline.errors import ModelError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SENTINELS = {"system": "lb5e9b71c0x0", "user": "lb5e9b71c0x1"}
_SPACE = "\u2003"  # around a sentinel: a template that strips contents drops it
LOOKS_LIKE_CONTROL = re.compile(r"^(<.+>|\[.+\])$", re.DOTALL)


@dataclass(frozen=True)
class Slot:
    """The place of a content in a chat, and the sides on which the template strips it."""

    role: str
    strips_left: bool
    strips_right: bool

    def filled(self, contents: dict[str, str]) -> str:
        """The content of the slot as the template writes it."""
        text = contents[self.role].lstrip() if self.strips_left else contents[self.role]
        return text.rstrip() if self.strips_right else text


@dataclass(frozen=True)
class ChatSkeleton:
    """The text that a chat template writes around the contents."""

    pieces: tuple[str | Slot, ...]  # fixed text, and where contents go
    merges_system: bool  # the model's template takes no system message, so it goes before the user's
    control_ids: tuple[int, ...]  # control tokens of the fixed text, in order
    before: tuple[int, ...] = ()  # tokens before the chat that its text does not show


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    user: str,
    system: str | None,
    chat_options: dict,
    date: datetime.date | None = None,
) -> np.ndarray:
    """Token ids, int32[n], of one turn that ends where the model's answer begins.

    `date`: the date for chat templates that print today's; None: that of the clock.

    Raises ModelError like `chat_skeleton`, and RowError if a text cannot be written in plain tokens.
    """
    skeleton = chat_skeleton(tokenizer, system is not None, json.dumps(chat_options, sort_keys=True), date)
    contents = {"user": user, "system": (system or "").strip()}
    if skeleton.merges_system and contents["system"]:
        contents["user"] = f"{contents['system']}\n\n{user}"
    texts = [piece if isinstance(piece, str) else piece.filled(contents) for piece in skeleton.pieces]
    ids = _meant(tokenizer, "".join(texts))
    if _control_ids(tokenizer, ids) != skeleton.control_ids:
        ids = []
        for piece, text in zip(skeleton.pieces, texts, strict=True):
            ids.extend(_meant(tokenizer, text) if isinstance(piece, str) else encode_content(tokenizer, text))
    return np.array([*skeleton.before, *ids], np.int32)


@lru_cache(maxsize=32)
def chat_skeleton(
    tokenizer: "PreTrainedTokenizerBase", with_system: bool, chat_options: str, date: datetime.date | None = None
) -> ChatSkeleton:
    """The skeleton of one turn that ends where the model's answer begins; `chat_options` are JSON.

    Raises ModelError if the tokenizer's chat template fails, or loses or repeats a content.
    """
    if not tokenizer.chat_template:
        logger.warning(
            "the model's tokenizer has no chat template, so prompts are plain text after its begin-of-text token; if "
            "the model was trained on chats, put its chat_template.jinja into the model's folder"
        )
        bos = () if tokenizer.bos_token_id is None else (cast(int, tokenizer.bos_token_id),)
        return ChatSkeleton((Slot("user", False, False), "\n\n"), True, (), bos)
    rendered = _apply(tokenizer, ["system", "user"], chat_options, date) if with_system else ""
    merges_system = any(rendered.count(sentinel) != 1 for sentinel in _SENTINELS.values())
    if merges_system:
        rendered = _apply(tokenizer, ["user"], chat_options, date)
        if rendered.count(_SENTINELS["user"]) != 1:
            raise ModelError(
                "the tokenizer's chat template does not show a user's message exactly once; "
                "put a chat template that does into the model's folder"
            )
    roles = {sentinel: role for role, sentinel in _SENTINELS.items()}
    pieces: list[str | Slot] = []
    for part in re.split(f"({_SPACE}?(?:{'|'.join(roles)}){_SPACE}?)", rendered):
        if (sentinel := part.strip(_SPACE)) in roles:
            pieces.append(Slot(roles[sentinel], not part.startswith(_SPACE), not part.endswith(_SPACE)))
        elif part:
            pieces.append(part)
    plain = "".join(piece if isinstance(piece, str) else _SENTINELS[piece.role] for piece in pieces)
    return ChatSkeleton(tuple(pieces), merges_system, _control_ids(tokenizer, _meant(tokenizer, plain)))


def _strftime_macro(date: datetime.date) -> str:
    """A Jinja macro that replaces the function `strftime_now`, for a date; transformers lets no function be passed."""
    midnight = datetime.datetime.combine(date, datetime.time())
    codes = [*(f"%-{code}" for code in "dmHIMSjy"), *(f"%{code}" for code in "aAbBcdDeFfGHIjmMpSTuUVwWxXyYzZ%")]
    values = (f" | replace({json.dumps(code)}, {json.dumps(midnight.strftime(code))})" for code in codes)
    # trim_blocks drops the line's end
    return "{%- macro strftime_now(format) -%}{{ format" + "".join(values) + " }}{%- endmacro %}\n"


def _apply(
    tokenizer: "PreTrainedTokenizerBase", roles: list[str], chat_options: str, date: datetime.date | None
) -> str:
    messages = [{"role": role, "content": f"{_SPACE}{_SENTINELS[role]}{_SPACE}"} for role in roles]
    try:
        options = {} if date is None else {"date_string": date.strftime("%d %b %Y")}  # Llama's variable
        options |= json.loads(chat_options)
        if date is not None and "strftime_now" in (template := tokenizer.get_chat_template()):
            options["chat_template"] = _strftime_macro(date) + template
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        return cast(str, rendered)
    except Exception as error:  # the model's chat template is a program and may raise anything
        if "system" in roles:
            return ""  # many templates refuse a system message
        raise ModelError(f"the tokenizer's chat template fails on a plain user message: {error}") from error


def encode_content(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text without any control token, whatever it looks like. Raises RowError if that is impossible."""
    ids = _encode(tokenizer, text)
    control = control_tokens(tokenizer)
    if control.keys().isdisjoint(ids):
        return ids
    # added tokens that are not marked special (Qwen3's <think>) are matched even as plain text: break them inside
    pattern = re.compile("|".join(re.escape(token) for token in sorted(control.values(), key=len, reverse=True)))
    cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    pieces = (text[start:stop] for start, stop in pairwise(cuts))
    ids = [token_id for piece in pieces if piece for token_id in _encode(tokenizer, piece)]
    if not control.keys().isdisjoint(ids):
        raise RowError("undecodable: the prompt's text cannot be written without a control token of the model")
    return ids


def _meant(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Token ids of a text, with its control tokens as such."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _control_ids(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> tuple[int, ...]:
    control = control_tokens(tokenizer)
    return tuple(token_id for token_id in ids if token_id in control)


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@lru_cache(maxsize=32)
def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Id and text of each control token: special tokens, and added tokens that look like them (`<think>`)."""
    control = {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special or LOOKS_LIKE_CONTROL.match(token.content)
    }
    for token_id, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True):
        control[token_id] = token
    if tokenizer.unk_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        control.pop(cast(int, tokenizer.unk_token_id), None)  # the unknown token is not a control token
    return control
