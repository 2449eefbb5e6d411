"""A frozen text encoder, from texts to unit vectors.

The vector of a text depends only on that text, to the last bit on one machine: padding is masked out, and the shape of
a forward depends only on the length of its texts. So an unchanged text keeps its vector from night to night, and equal
texts of two runs have equal features, also in bfloat16.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from laserbatch.pipeline.decoding.model.described_weights import OUTSIDE_LAYERS, require_whole_weights
from laserbatch.pipeline.encoding.identity import device_and_dtype, encoder_identity, find_encoder
from laserbatch.pipeline.encoding.settings import EncodingSettings
from laserbatch.pipeline.encoding.vector_files import Encoding
from laserbatch.pipeline.errors import ModelError

DEFAULT_BATCH_TOKENS = {"cpu": 2048, "cuda": 65_536}
LENGTH_STEP = 32  # lengths are padded to a multiple of this


class TextEncoder:
    """A transformers encoder with mean pooling and L2 normalisation.

    Its vectors have `dim` numbers; vectors of the same `encoder_id` can be compared, see `identity`.
    """

    def __init__(self, model, tokenizer, encoder_id: str, max_text_tokens: int, max_batch_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._max_text_tokens, self._max_batch_tokens = max_text_tokens, max_batch_tokens
        self.encoder_id = encoder_id
        self.dim: int = model.config.hidden_size

    @classmethod
    def load(
        cls, settings: EncodingSettings = EncodingSettings(), max_batch_tokens: int | None = None
    ) -> "TextEncoder":
        """Load the encoder that the settings name; a forward pass takes at most `max_batch_tokens`, padding included.

        Raises ModelError if its package or folder is missing, its weights are unexpected, or it is not an encoder.
        """
        folder, _ = find_encoder(settings)
        device, dtype = device_and_dtype(settings)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            transformers_logging.disable_progress_bar()
            transformers_logging.set_verbosity_error()  # no warnings about heads that are not used here
            model, loading_info = AutoModel.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=dtype,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception as error:  # transformers may raise anything
            raise ModelError(f"{folder} has no encoder that transformers can load: {error}") from error
        require_whole_weights(folder, loading_info, unused=("pooler.",), harmless=OUTSIDE_LAYERS)
        if tokenizer.pad_token_id is None:
            expected = "expected an encoder such as BERT or MiniLM"
            raise ModelError(f"{folder}: the tokenizer has no padding token; {expected}")
        limit = getattr(model.config, "max_position_embeddings", None) or settings.max_text_tokens
        max_text_tokens = min(settings.max_text_tokens, limit, tokenizer.model_max_length)
        max_batch_tokens = max_batch_tokens or DEFAULT_BATCH_TOKENS[device]
        return cls(model.to(device).eval(), tokenizer, encoder_identity(settings), max_text_tokens, max_batch_tokens)

    def encode(self, texts: list[str], on_batch: Callable[[int], None] = lambda num_texts: None) -> Encoding:
        """Encode texts, each distinct one once, batched by length.

        `on_batch` is called after each batch with the number of texts that it encoded, repeated ones included.
        """
        if not texts:
            return Encoding(np.zeros((0, self.dim), np.float32), 0)
        position_of: dict[str, int] = {}
        row_to_distinct = np.fromiter((position_of.setdefault(text, len(position_of)) for text in texts), np.int64)
        repeats = np.bincount(row_to_distinct)
        # The tokenizer does not truncate, so that longer texts can be counted; "[SEP]" in a text is text.
        tokenized = self._tokenizer(list(position_of), truncation=False, verbose=False, split_special_tokens=True)
        tokenized, most = tokenized["input_ids"], self._max_text_tokens
        is_long = np.array([len(ids) > most for ids in tokenized])
        rows = [[*ids[: most - 1], ids[-1]] if len(ids) > most else ids for ids in tokenized]  # all have an end token
        vectors = np.zeros((len(rows), self.dim), np.float32)
        for indices, shape in self._batches([len(ids) for ids in rows]):
            vectors[indices] = self._forward([rows[index] for index in indices], shape)
            on_batch(int(repeats[indices].sum()))
        return Encoding(vectors[row_to_distinct], int(repeats[is_long].sum()))

    def _batches(self, lengths: list[int]) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
        """Yield texts of one padded length, longest first, and the shape of their forward, which depends only on it."""
        padded = np.minimum(-(-np.asarray(lengths) // LENGTH_STEP) * LENGTH_STEP, self._max_text_tokens)
        for length in np.unique(padded)[::-1]:
            indices = np.flatnonzero(padded == length)
            num_rows = max(1, self._max_batch_tokens // int(length))
            for start in range(0, len(indices), num_rows):
                yield indices[start : start + num_rows], (num_rows, int(length))

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]], shape: tuple[int, int]) -> np.ndarray:
        input_ids = torch.full(shape, self._tokenizer.pad_token_id)
        mask = torch.zeros(shape, dtype=torch.long)
        mask[len(rows) :, 0] = 1  # padding rows attend to one token, or softmax would be nan
        for index, ids in enumerate(rows):
            input_ids[index, : len(ids)] = torch.tensor(ids)
            mask[index, : len(ids)] = 1
        device = self._model.device
        mask = mask.to(device)
        hidden = self._model(input_ids=input_ids.to(device), attention_mask=mask).last_hidden_state.float()
        weights = mask.unsqueeze(-1).float()
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)  # (batch, dim)
        return torch.nn.functional.normalize(mean, dim=1)[: len(rows)].cpu().numpy()
