"""Guided answers in a template's form by a real language model: the share that is kept, the savings and the cost.

    python benchmarks/guided.py --models DIR --quick --json guided.json

DIR has the folder `smollm2-135m-instruct`, SmolLM2-135M-Instruct as safetensors; without it nothing is measured. The
templates of four frameworks ask about viewers and films of MovieLens 100K. Each is answered three times at the same
batch size: without guiding, guided without drafts, and guided with greedy drafts of up to 8 tokens from prompt and
output.

`kept` is the share of answers that a night keeps. `forced` is the share of a guided text's tokens for which the grammar
leaves no choice; they are appended without a forward. `guiding` is the share of the writing time spent on guiding:
compiling grammars, making masks and following them.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from common import SMOLLM2, Figure, begun_with_smollm2, finish, scale_of, table
from rule_quality import is_kept
from systems import in_order
from tasks import Task, TaskSize, movielens_settings, movielens_tasks

from laserbatch.pipeline.decoding import guided
from laserbatch.pipeline.decoding.drafters import RetrievalDrafter
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.grammar import Guide
from laserbatch.pipeline.decoding.sequence import GenerationRequest, GenerationResult
from laserbatch.pipeline.decoding.settings import Budget, DecodingSettings
from laserbatch.pipeline.decoding.verifiers import Greedy
from laserbatch.pipeline.knowledge.forms import guiding_grammar
from laserbatch.pipeline.knowledge.templates import PromptTemplate
from laserbatch.retrieval_pools.sources import SOURCE_FORM

FRAMEWORKS = ("kar", "once", "trawl", "rlmrec")
MAX_DRAFT_TOKENS, MIN_ACCEPTANCE = 8, 0.0
MIN_KEPT, MAX_GUIDING = 31 / 32, 0.05
# The calls that guiding consists of; none is called within another.
CALLS = ((guided, "begin"), (guided, "advance"), (guided.GuidedLogits, "masks"), (Guide, "num_allowed"))
COLUMNS = {
    "template": "{template}", "way": "{way}", "kept": "{kept:.2f}", "tokens": "{length:.0f}", "forced": "{forced:.2f}",
    "tokens per step": "{tokens_per_step:.2f}", "tokens/s": "{tokens_per_s:.0f}", "guiding": "{guiding:.3f}",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """The number of questions per template, and the maximum number of tokens of an answer."""

    num_texts: int
    max_new_tokens: int
    frameworks: tuple[str, ...] = FRAMEWORKS


FULL, QUICK, SMOKE = Scale(32, 200), Scale(16, 80), Scale(2, 24, ("once",))


@contextmanager
def timed_guiding() -> Iterator[list[float]]:
    """Sum the seconds that guiding takes within the block; yields a list with this one number."""
    seconds = [0.0]

    def timed(call: Callable) -> Callable:
        @functools.wraps(call)
        def wrapped(*args):
            start_s = time.perf_counter()
            try:
                return call(*args)
            finally:
                seconds[0] += time.perf_counter() - start_s

        return wrapped

    with ExitStack() as patches:
        for owner, name in CALLS:
            patches.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds


def measure(engine: Engine, task: Task, template: PromptTemplate, decoding: DecodingSettings) -> Iterator[dict]:
    """Yield a row for each way to answer a template's questions."""
    grammar = guiding_grammar(template, decoding)
    drafter = RetrievalDrafter(None, ("prompt", "output"), MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
    plain: list[GenerationResult] = []
    for way, form, drafts in (("free", None, None), ("guided", grammar, None), ("guided, drafted", grammar, drafter)):
        if way != "free" and grammar is None:
            continue
        requests = [
            GenerationRequest(str(number), prompt, None, None, decoding.max_new_tokens, 0, form)
            for number, prompt in enumerate(task.held_out)
        ]
        engine.reset_prefix_cache()
        budget = Budget(0 if drafts is None else MAX_DRAFT_TOKENS, MIN_ACCEPTANCE)
        with timed_guiding() as guiding_s:
            start_s = time.perf_counter()
            texts = in_order(engine.generate(requests, drafts, Greedy(), budget))
            seconds = time.perf_counter() - start_s
        plain = texts if way == "guided" else plain
        num_tokens = sum(len(text.token_ids) for text in texts)
        yield {
            "template": template.name,
            "way": way,
            "num_texts": len(texts),
            "kept": float(np.mean([is_kept(template, *pair) for pair in zip(texts, task.held_out, strict=True)])),
            "length": num_tokens / len(texts),
            "forced": sum(int((text.sources == SOURCE_FORM).sum()) for text in texts) / num_tokens,
            "tokens_per_step": num_tokens / sum(text.num_steps for text in texts),
            "tokens_per_s": num_tokens / seconds,
            "guiding": guiding_s[0] / seconds,
            "num_as_guided": sum(
                np.array_equal(text.token_ids, other.token_ids) for text, other in zip(texts, plain, strict=False)
            ),
        }


def figures_of(rows: Sequence[dict]) -> Iterator[Figure]:
    """The figures: kept answers, time of guiding, and drafted texts that must equal the guided ones without drafts."""
    for row in rows:
        if row["way"] == "free":
            continue
        about = f"{row['template']}, {row['way']}"
        yield Figure.at_least(f"{about}: share of answers kept", row["kept"], MIN_KEPT)
        yield Figure.at_most(f"{about}: share of the time that guiding takes", row["guiding"], MAX_GUIDING)
        if row["way"] != "guided":
            same = row["num_as_guided"] / row["num_texts"]
            yield Figure.at_least(f"{about}: share of texts as without drafts", same, 1.0)


def main() -> None:
    """Answer the questions of every template."""
    arguments, model_dir = begun_with_smollm2(__doc__)
    scale = scale_of(arguments, FULL, QUICK, SMOKE)
    decoding = DecodingSettings(model=str(model_dir), batch_size=16, max_new_tokens=scale.max_new_tokens)
    engine, rows = Engine.from_pretrained(model_dir, decoding, "cpu"), []
    for framework in scale.frameworks:
        settings = movielens_settings(framework)
        size = TaskSize(scale.num_texts, 0)
        for task in movielens_tasks(engine.tokenizer, arguments.data, size, scale.max_new_tokens, framework):
            for row in measure(engine, task, settings.template(task.side), decoding):
                print(", ".join(form.format(**row) for form in COLUMNS.values()), flush=True)
                rows.append(row)
    finish(arguments.json, list(figures_of(rows)), [table(rows, COLUMNS)], {"model": SMOLLM2, "rows": rows})


if __name__ == "__main__":
    main()
