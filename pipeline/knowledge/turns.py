"""The marks that a chat template writes around turns, and the search for those that end the model's turn in an answer.

A model that was tuned with another end token than its configuration names continues after its answer and invents turns.
So the marks are taken from the template, by rendering a chat whose messages are placeholders. Control tokens between
messages end texts (`ChatMarks.end_tokens`); marks of plain text (`### Human:`, `[INST]`) are searched for in a finished
text. Marks that the model itself writes before its content (`<|channel|>final<|message|>`) do not count.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from laserbatch.pipeline.knowledge.chat_format import control_tokens
from laserbatch.pipeline.knowledge.thoughts import is_thought_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDERS = {name: f"lb5e9b71c0y{n}" for n, name in enumerate(("system", "user", "assistant", "user again"))}
_CHATS = (tuple(_PLACEHOLDERS), tuple(_PLACEHOLDERS)[1:], ("user",))  # the first that a template takes is used
# Control tokens of other models, written as plain text: <|user|>, <<SYS>>, [INST], <human>.
_FORM = re.compile(r"<<?[^<>\s]{1,40}>>?|\[/?\|?[A-Za-z_]{2,30}\|?\]")
_LABEL = re.compile(r"(?=.*[^\W\d_])(?:[^\n]{1,40}:|#{1,6} [^\n]{1,40})")  # `USER:`, `### Response:`, `### User`
_IS_NO_PROSE = re.compile(r"#|[A-Z]{3,}:")  # labels that no answer has, even within a line
_SENTENCE_END = r"(?<=[.!?…\"'”’)\]>}。！？])"
# Tokens that end an answer even if neither template nor configuration names them; padding does, too.
_END = re.compile(
    r"</s>|<\|?(?:eos|eot|eot_id|eom_id|eod|end|endoftext|end_of_text|end_of_turn|end_of_message|im_end|return)\|?>|"
    r"<｜end▁of▁sentence｜>|<\|END_OF_TURN_TOKEN\|>"
)
_CHANNEL = "<|channel|>"  # gpt-oss: thoughts and answer are messages, each with its own role marks


@dataclass(frozen=True)
class ChatMarks:
    """The marks in an answer that end the model's turn."""

    end_tokens: dict[int, str]  # id and text of role marks that are one token, and of known end tokens
    labels: re.Pattern[str] | None  # pattern of role marks that are text; None without any

    def turn_in(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first role mark of plain text, which begins another turn; a label at the beginning does not count."""
        return self.labels.search(text, len(text) - len(text[start:].lstrip())) if self.labels else None


@lru_cache(maxsize=32)
def chat_marks(tokenizer: "PreTrainedTokenizerBase") -> ChatMarks:
    """The role marks of a tokenizer's chat template, if it has one that works, and known end tokens."""
    texts, names = _between_messages(tokenizer)
    control = control_tokens(tokenizer)
    tokens = [[i for i in tokenizer(text, add_special_tokens=False)["input_ids"] if i in control] for text in texts]
    written_by_model: list[int] = []
    labels = [*_text_marks(texts, names, list(control.values()))]
    if "assistant" in names:  # marks before its message that are not in the generation prompt, the last text
        place = names.index("assistant")
        pairs = zip(tokens[place], tokens[-1], strict=False)
        num_shared = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
        written_by_model = tokens[place][num_shared:]
        labels += [re.escape(control[i]) for i in tokens[place + 1] if i in written_by_model]
    marks = {i: control[i] for part in tokens for i in part
             if i not in written_by_model and not is_thought_mark(control[i])}  # fmt: skip
    if _CHANNEL in control.values():
        labels, marks = [*labels, *map(re.escape, marks.values())], {}
    else:
        marks |= {i: text for i, text in control.items() if _END.fullmatch(text) or i == tokenizer.pad_token_id}
    return ChatMarks(marks, re.compile("|".join(dict.fromkeys(labels))) if labels else None)


def _between_messages(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[str], list[str]]:
    """The texts that the template writes before each message and after the last one, and the messages' names."""
    roles = {placeholder: name for name, placeholder in _PLACEHOLDERS.items()}
    for chat in _CHATS if tokenizer.chat_template else ():
        messages = [{"role": name.split()[0], "content": _PLACEHOLDERS[name]} for name in chat]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # the model's chat template is a program; many refuse a system message
            continue
        parts = re.split("(" + "|".join(roles) + ")", cast(str, rendered))
        return parts[::2], [roles[placeholder] for placeholder in parts[1::2]]
    return [""], []


def _text_marks(texts: list[str], names: list[str], control: list[str]) -> Iterator[str]:
    """Patterns of role marks that are no control tokens; before the first message only the last line counts."""
    pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
    for place, text in enumerate(texts):
        if names[place : place + 1] == ["assistant"]:  # the generation prompt, and what the model writes itself
            continue
        plain = pattern.sub("\n", text)
        if place == 0:
            plain = plain.rstrip().rpartition("\n")[2]
        yield from (re.escape(form) for form in _FORM.findall(plain) if not is_thought_mark(form))
        last_line = _FORM.sub("\n", plain).rstrip().rpartition("\n")[2].strip()
        if names[place : place + 1] != ["system"] and _LABEL.fullmatch(last_line) and not is_thought_mark(last_line):
            is_inline = place > 0 and "\n" not in pattern.sub("", text).rstrip()
            before = r"\s+" if is_inline or _IS_NO_PROSE.match(last_line) else r"\n\s*"
            yield rf"(?:{before}|{_SENTENCE_END}\s*){re.escape(last_line)}"
