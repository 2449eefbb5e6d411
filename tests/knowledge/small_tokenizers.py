"""Small real tokenizers of several kinds, with and without chat templates."""

from entities import Entity, HistoryEvent
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>", "</s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ bos_token }}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages %}{% if m['role'] == 'user' %}<s>{{ m['content'] }}</s>{% endif %}{% endfor %}"
TEXTS = ["The Salt Harbour of Lorne | Mystery > Heist | 5", "- title: user assistant system im_start think", "end pad"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[*SPECIAL, "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer, chat_template: str | None) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    wrapped.chat_template = chat_template
    return wrapped


def thinking() -> PreTrainedTokenizerFast:
    tokenizer = wrap(byte_level(), CHATML)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return tokenizer


KINDS = {
    "chatml": lambda: wrap(byte_level(), CHATML),
    "thinking": thinking,
    "no-system": lambda: wrap(byte_level(), NO_SYSTEM),
    "drops-system": lambda: wrap(byte_level(), DROPS_SYSTEM),
    "metaspace": lambda: wrap(metaspace(), CHATML),
    "plain": lambda: wrap(byte_level(), None),
}


def make_user(num_events: int, title: str = "The Salt Harbour") -> Entity:
    """A user whose events are numbered from the oldest."""
    events = tuple(
        HistoryEvent(index, f"{title} {index}", {"category": ["Mystery", "Heist"], "year": 1999.0}, 1.0 + index % 5)
        for index in range(num_events)
    )
    return Entity("user", 7, {"region": "Lorne", "tags": ["a", None, "b"], "member": True}, events)
