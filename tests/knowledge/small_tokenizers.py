"""Small real tokenizers of several kinds, with and without chat templates."""

from entities import Entity, HistoryEvent
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
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


def _sentence_piece(model: models.Model, trainer: trainers.Trainer, **parts) -> Tokenizer:
    """A tokenizer with the components of files that were converted from SentencePiece."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def _bpe(**parts) -> Tokenizer:
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁", "é"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=[*SPECIAL, "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    return _sentence_piece(models.BPE(unk_token="<unk>"), trainer, **parts)


def _unigram(**parts) -> Tokenizer:
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁", "é"]
    trainer = trainers.UnigramTrainer(
        vocab_size=340, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    return _sentence_piece(models.Unigram(), trainer, **parts)


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        TEXTS * 4, trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], show_progress=False)
    )
    return tokenizer


def _byte_level_with_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


_SPACES = normalizers.Replace(" ", "▁")
SCHEMES = {  # how tokenizers treat the beginning of a text and of what follows a control token
    "metaspace always": lambda: _bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": lambda: _bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace unsplit": lambda: _bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace never": lambda: _bpe(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")),
    "prepended by the normalizer": lambda: _bpe(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), _SPACES])),
    "spaces replaced": lambda: _bpe(normalizer=_SPACES),
    "unigram, normalized": lambda: _unigram(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"),
    ),
    "unigram first": lambda: _unigram(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "byte level": byte_level,
    "byte level with a space": _byte_level_with_space,
    "word piece": _word_piece,
}  # fmt: skip


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
