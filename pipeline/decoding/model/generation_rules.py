"""What a model folder's generation_config.json asks of greedy decoding: done, refused, or not used. Stated here alone.

- End tokens end texts (`loading.load.end_tokens`); `repetition_penalty` and `suppress_tokens` are done, as
  `transformers.generate` does them.
- Whatever else would change which token is the likeliest is refused: REFUSED.
- What names another way of decoding, or another limit, is not used: NOT_USED.

What is done is part of a model's identity, and with it of its texts' fingerprints; a neutral value is as none.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laserbatch.pipeline.decoding.memory.device_memory import to_device
from laserbatch.pipeline.decoding.model.output_head import StepLogits
from laserbatch.pipeline.decoding.token_tree import TreeBatch
from laserbatch.pipeline.errors import ModelError

# Each with its neutral value, beside null.
REFUSED = {
    "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "bad_words_ids": [], "sequence_bias": {}, "begin_suppress_tokens": [],
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0, "watermarking_config": None, "token_healing": False, "stop_strings": [], "max_time": None,
    "dola_layers": None, "constraints": None, "force_words_ids": None,
}  # fmt: skip
NOT_USED = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "penalty_alpha": None, "max_length": 20, "max_new_tokens": None,
}  # fmt: skip


@dataclass(frozen=True)
class GenerationRules:
    """What is done to logits: those of tokens that a text or its prompt has already are divided by a penalty (where
    they are negative, multiplied), and some tokens are never written.
    """

    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is."""
        return self != NO_RULES

    def on(self, rows: StepLogits, contexts: Sequence[np.ndarray], trees: TreeBatch) -> StepLogits:
        """A step's logits as these rules change them; `rows` themselves where they change nothing.

        Parameters
        ----------
        rows : of each sequence one after its last committed token, then one after each node of its tree.
        contexts : each sequence's prompt and committed tokens, int32.
        """
        return RuledLogits(self, rows, contexts, trees) if self else rows


NO_RULES = GenerationRules()


class RuledLogits:
    """Rows of a step after GenerationRules, each by the tokens of its own path: context, ancestors, node."""

    def __init__(
        self, rules: GenerationRules, rows: StepLogits, contexts: Sequence[np.ndarray], trees: TreeBatch
    ) -> None:
        self._rules, self._rows = rules, rows
        self.device, self.num_rows = rows.device, rows.num_rows
        # What is shorter repeats its first token, which is penalised once all the same.
        context_ids = np.empty((len(contexts), max(map(len, contexts))), np.int64)
        for own, context in zip(context_ids, contexts, strict=True):
            own[: len(context)], own[len(context) :] = context, context[0]
        self._context_of = np.repeat(np.arange(len(contexts)), trees.sizes + 1)  # of each row
        self._path_ids = np.repeat(context_ids[self._context_of, :1], trees.sizes.max(), axis=1)
        if len(trees):
            number = np.arange(trees.sizes.max())
            is_above = (trees.ancestors[:, None] >> number) & 1 > 0
            nodes = np.minimum(trees.starts[trees.tree_of, None] + number, len(trees) - 1)
            rows_of_nodes = np.arange(len(trees)) + trees.tree_of + 1
            unpenalised = self._path_ids[rows_of_nodes]
            self._path_ids[rows_of_nodes] = np.where(is_above, trees.token_ids[nodes], unpenalised)
        self._context_ids = to_device(context_ids, self.device)

    @torch.inference_mode()
    def of(self, rows: np.ndarray) -> torch.Tensor:
        """Logits of some rows, int64[n]: float32 (n, vocab_size), as `generate` has them."""
        logits = self._rows.of(rows).float()
        penalty = self._rules.repetition_penalty
        if penalty != 1.0:
            of_context = self._context_ids.index_select(0, to_device(self._context_of[rows], self.device))
            token_ids = torch.cat((of_context, to_device(self._path_ids[rows], self.device)), 1)
            scores = logits.gather(1, token_ids)
            logits = logits.scatter(1, token_ids, torch.where(scores < 0, scores * penalty, scores / penalty))
        suppressed = [token_id for token_id in self._rules.suppress_tokens if token_id < logits.shape[1]]
        if suppressed:
            logits = logits.index_fill(1, to_device(np.array(suppressed), self.device), -torch.inf)
        return logits


def rules_of(config: Mapping[str, Any], source: str | Path) -> GenerationRules:
    """The rules of a generation configuration.

    Raises
    ------
    ModelError : it asks for what is not done; `source` is where it stands.
    """
    for key, neutral in REFUSED.items():
        if not _is_neutral(config.get(key), neutral):
            raise ModelError(
                f"{source} sets {key} to {_shown(config[key])}, which changes greedy decoding and is not done here; "
                f"remove the key from the file{' and set decoding.stop_strings' if key == 'stop_strings' else ''}"
            )
    penalty = config.get("repetition_penalty")
    penalty = 1.0 if penalty is None else penalty
    if not isinstance(penalty, int | float) or not penalty > 0:
        raise ModelError(f"{source} sets repetition_penalty to {_shown(penalty)}; expected a number above 0 (1: none)")
    return GenerationRules(float(penalty), tuple(config.get("suppress_tokens") or ()))


def folder_rules(folder: Path) -> dict[str, Any]:
    """What of a folder's generation_config.json is done and differs from neutral values and from its config.json.

    Raises
    ------
    ModelError : it is no JSON object, or as `rules_of`.
    """
    config, source = read_generation_config(folder)
    rules = rules_of(config, source)
    done = {key: value for key, value in asdict(rules).items() if value != getattr(NO_RULES, key)}
    if source.name != "config.json":  # which is part of the identity as a whole
        own, other = (_ids(values.get("eos_token_id")) for values in (config, _read(folder / "config.json")))
        return done | ({"eos_token_id": own} if own and own != other else {})
    return {}


def unused_settings(folder: Path) -> str | None:
    """One line that names what of a folder's generation configuration is not used; None where all is."""
    config, source = read_generation_config(folder)
    named = [key for key, neutral in NOT_USED.items() if not _is_neutral(config.get(key), neutral)]
    if not named:
        return None
    found = [f"{key} {_shown(config[key])}" for key in named]
    return f"{source}: not used, since decoding is greedy up to decoding.max_new_tokens: {', '.join(found)}"


def read_generation_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """A folder's generation configuration, and its file: that of old models is in config.json.

    Raises
    ------
    ModelError : it is no JSON object.
    """
    file = folder / "generation_config.json"
    file = file if file.is_file() else folder / "config.json"
    return _read(file), file


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); fetch it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no JSON object; fetch it again")
    return config


def _is_neutral(value: Any, neutral: Any) -> bool:
    return value is None or value == neutral


def _ids(value: int | list[int] | None) -> list[int]:
    return sorted(set(value if isinstance(value, list) else [] if value is None else [value]))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
