"""The cost of verification rules in quality on a real language model: texts of each rule, compared with plain texts.

    python benchmarks/rule_quality.py --models DIR --quick --json rule_quality.json

DIR has the folder `smollm2-135m-instruct`, SmolLM2-135M-Instruct as safetensors; without it nothing is measured. The
prompts are KAR's questions about viewers and films of MovieLens 100K; answers about viewers are guided by the
template's form, answers about films are free. Every rule drafts up to 8 tokens from the prompt, the output and a pool
of the model's plain texts about other entities, and answers the same held-out prompts at the same batch size.

`log_probability` is a token's mean log probability under the model, in nats. `repeated` is the share of a text's
8-grams that occur earlier in it. `cosine` compares MiniLM's vectors of a text and the plain text. `kept` is the share
of answers that a night keeps. The length of texts differs by rule, so speed is in texts per second.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import torch
from common import SEED, SMOLLM2, Interval, begun_with_smollm2, finish, scale_of, table
from systems import in_order
from tasks import Task, TaskSize, build, movielens_tasks

from laserbatch.jobs.gates import repeated_shares
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.sequence import GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import verifier_from
from laserbatch.pipeline.encoding.encoder import TextEncoder
from laserbatch.pipeline.errors import RowError
from laserbatch.pipeline.knowledge.answers import require_answer
from laserbatch.pipeline.knowledge.domains import of_domain
from laserbatch.pipeline.knowledge.forms import guiding_grammar
from laserbatch.pipeline.knowledge.parsers import parse_answer
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, PromptTemplate

SOURCES = ("prompt", "output", "pool")
MAX_DRAFT_TOKENS, MIN_ACCEPTANCE = 8, 0.0
PLAIN = "plain"
RULES = {
    "greedy": {"verifier": "greedy"},
    "relaxed, top 2 above 0.05": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.05},
    "relaxed, top 2 above 0.1": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.1},
    "relaxed, top 2 above 0.2": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.2},
    "relaxed, top 2 above 0.3": {"verifier": "relaxed", "top_k": 2, "min_probability": 0.3},
    "relaxed, top 3 above 0.2": {"verifier": "relaxed", "top_k": 3, "min_probability": 0.2},
    "typical": {"verifier": "typical"},
    "fly": {"verifier": "fly"},
}
COLUMNS = {
    "task": "{task}", "rule": "{rule}", "tokens per step": "{tokens_per_step:.2f}", "texts/s over plain": "{speed:.2f}",
    "log-probability": "{log_probability:.3f}", "repeated": "{repeated:.2f}", "tokens": "{length:.0f}",
    "cosine": "{cosine:.3f}", "kept": "{kept:.2f}",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """The numbers of texts to measure and in the pool, and the maximum number of tokens of a text."""

    size: TaskSize
    max_new_tokens: int


FULL, QUICK, SMOKE = Scale(TaskSize(64, 80), 200), Scale(TaskSize(16, 24), 120), Scale(TaskSize(3, 3), 12)


class Writer:
    """Writes texts of one side with one engine, under any rule."""

    def __init__(self, model: Path, template: PromptTemplate, max_new_tokens: int) -> None:
        self.decoding = DecodingSettings(model=str(model), batch_size=16, max_new_tokens=max_new_tokens)
        self.engine = Engine.from_pretrained(model, self.decoding, "cpu")
        self._grammar = guiding_grammar(template, self.decoding)

    def write(
        self,
        prompts: Sequence[np.ndarray],
        drafter,
        rule: dict,
        previous: Sequence[np.ndarray] | None = None,
    ) -> tuple[list[GenerationResult], float]:
        """Write texts; return them in order, and the seconds. `previous`: each prompt's earlier text, int32[n]."""
        most = self.decoding.max_new_tokens
        requests = [
            GenerationRequest(str(number), prompt, own, None, most, 0, self._grammar)
            for number, (prompt, own) in enumerate(zip(prompts, previous or [None] * len(prompts), strict=True))
        ]
        self.engine.reset_prefix_cache()
        verifier = verifier_from(self.decoding.model_copy(update=rule))
        budget = Budget(MAX_DRAFT_TOKENS if drafter is not None else 0, MIN_ACCEPTANCE)
        start_s = time.perf_counter()
        texts = in_order(self.engine.generate(requests, drafter, verifier, budget))
        return texts, time.perf_counter() - start_s


@torch.inference_mode()
def log_probabilities(model, prompts: Sequence[np.ndarray], texts: Sequence[np.ndarray]) -> np.ndarray:
    """The mean log probability of each text's tokens after its prompt: float64[num_texts]."""
    shares = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.from_numpy(np.concatenate((prompt, text)).astype(np.int64))
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        picked = logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])
        shares.append(float(picked.mean()) if len(text) else np.nan)
    return np.array(shares)


def measure(task: Task, template: PromptTemplate, model_dir: Path, max_new_tokens: int, scorer) -> Iterator[dict]:
    """Yield a row for plain decoding and for each rule."""
    writer, encoder = Writer(model_dir, template, max_new_tokens), TextEncoder.load()
    pool_texts, _ = writer.write(task.pool_prompts, None, RULES["greedy"])
    prompts = task.held_out
    with tempfile.TemporaryDirectory() as folder:
        pool = build([text.token_ids for text in pool_texts], Path(folder) / "pool", task.side)
        writer.write(prompts[:2], RetrievalDrafter(pool, SOURCES, MAX_DRAFT_TOKENS, MIN_ACCEPTANCE), RULES["greedy"])
        plain: list[GenerationResult] = []
        plain_s = 0.0
        for rule, settings in {PLAIN: RULES["greedy"], **RULES}.items():
            drafter = None
            if rule != PLAIN:
                drafter = RetrievalDrafter(pool, SOURCES, MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
            texts, seconds = writer.write(prompts, drafter, settings)
            if rule == PLAIN:
                plain, plain_s = texts, seconds
            scores = log_probabilities(scorer, prompts, [text.token_ids for text in texts])
            row = quality(texts, plain, prompts, template, encoder, {"log_probability": scores})
            yield {"task": task.name, "rule": rule, "speed": plain_s / seconds, "seconds": seconds, **row}


def quality(
    texts: Sequence[GenerationResult],
    plain: Sequence[GenerationResult],
    prompts: Sequence[np.ndarray],
    template: PromptTemplate,
    encoder: TextEncoder,
    scores: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict:
    """Means over texts, with intervals, of the module's quantities and of `scores`, float64[num_texts] each.

    `plain` are the plain texts of the same prompts.
    """
    vectors, others = (encoder.encode([text.text for text in part]).vectors for part in (plain, texts))
    token_ids = [text.token_ids for text in texts]
    per_text = {
        **scores,
        "repeated": repeated_shares(pa.chunked_array([pa.array(token_ids, pa.list_(pa.int32()))])),
        "length": np.array([len(ids) for ids in token_ids], float),
        "cosine": (np.asarray(vectors, float) * np.asarray(others, float)).sum(-1),
        "kept": np.array([is_kept(template, text, p) for text, p in zip(texts, prompts, strict=True)], float),
    }
    return {
        "num_texts": len(texts),
        "tokens_per_step": sum(map(len, token_ids)) / sum(text.num_steps for text in texts),
        "num_as_plain": sum(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(texts, plain, strict=True)),
        **{name: float(np.nanmean(values)) for name, values in per_text.items()},
        "intervals": {name: interval(values) for name, values in per_text.items()},
    }


def is_kept(template: PromptTemplate, result: GenerationResult, prompt: np.ndarray) -> bool:
    """Whether a night would keep an answer."""
    try:
        require_answer(template, result.text, result.token_ids, prompt)
        parse_answer(template, result.text, result.finish_reason == "length")
    except RowError:
        return False
    return True


def interval(values: np.ndarray) -> Interval:
    """The bootstrap interval of the mean over texts, without NaNs."""
    values = values[~np.isnan(values)]
    drawn = np.random.default_rng(SEED).choice(values, (1000, len(values))).mean(axis=1)
    return Interval.of(np.concatenate(([values.mean()], drawn)))


def main() -> None:
    """Write and measure the texts of every rule."""
    from transformers import AutoModelForCausalLM

    arguments, model_dir = begun_with_smollm2(__doc__)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    settings = of_domain(KnowledgeSettings(), "films")
    scorer = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = Engine.from_pretrained(model_dir, DecodingSettings(model=str(model_dir)), "cpu").tokenizer
    rows: list[dict] = []
    for task in movielens_tasks(tokenizer, arguments.data, scale.size, scale.max_new_tokens):
        for row in measure(task, settings.template(task.side), model_dir, scale.max_new_tokens, scorer):
            print(", ".join(form.format(**row) for form in COLUMNS.values()), flush=True)
            rows.append(row)
    finish(arguments.json, [], [table(rows, COLUMNS)], {"model": SMOLLM2, "rows": rows})


if __name__ == "__main__":
    main()
