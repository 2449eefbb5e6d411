"""The training examples of the sample model: prompts with their answers, and two exercises.

An answer has few words of lore and few words that must be looked up; the exercises have many. Production code renders
the prompts.
"""

from dataclasses import dataclass, replace

import numpy as np
from entities import Entity, render_prompt
from sample_lore import title_themes
from sample_texts import POSITIVE_RATING, WRITERS
from transformers import PreTrainedTokenizerBase

from laserbatch.pipeline.knowledge.domains import of_domain
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, PromptTemplate
from laserbatch.pipeline.sample.lore import THEMES
from laserbatch.pipeline.sides import Side

MAX_PROMPT_TOKENS = 1_024
LORE_TITLES = 6  # titles in one exercise


@dataclass(frozen=True)
class Example:
    """One prompt and its answer, end token included."""

    prompt_ids: np.ndarray  # int32[n]
    answer_ids: np.ndarray  # int32[m]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


def shorten(entity: Entity, longest: int, rng: np.random.Generator) -> Entity:
    """Sometimes drop part of a history, so that every length is seen; keep at most `longest` events."""
    keep = min(len(entity.history), longest)
    if rng.random() < 0.4:
        keep = int(rng.integers(keep + 1))
    return replace(entity, history=entity.history[len(entity.history) - keep :])


def template_of(side: Side, framework: str = "kar") -> PromptTemplate:
    """The built-in template of a framework, in the words of the sample world."""
    named = KnowledgeSettings(user_template=f"{framework}_user", item_template=f"{framework}_item")
    return of_domain(named, "sample").template(side)


def make_example(
    entity: Entity, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator, framework: str = "kar"
) -> Example:
    """The prompt and answer of one entity; the prompt is rendered as in production."""
    rendered = render_prompt(template_of(entity.side, framework), entity, tokenizer, MAX_PROMPT_TOKENS)
    write_of_user, write_of_item = WRITERS[framework]
    if entity.side == "user":
        text = write_of_user(entity, entity.history[len(entity.history) - rendered.num_history :], rng)
    else:
        text = write_of_item(entity, rng)
    answer = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return Example(rendered.token_ids, np.array(answer, np.int32))


def make_copy_example(entity: Entity, tokenizer, rng: np.random.Generator) -> Example:
    """An exercise in looking up: copy all history lines of the prompt, or only the lines of liked titles.

    The prompt ends with the heading of that list; otherwise the model would learn such a list as the prompt's answer.
    """
    template = template_of("user")
    rendered = render_prompt(template, entity, tokenizer, MAX_PROMPT_TOKENS)
    shown = entity.history[len(entity.history) - rendered.num_history :]
    lines = (
        tokenizer.decode(rendered.token_ids)
        .split(template.history.heading + "\n")[1]
        .split("<|assistant|>")[0]
        .split("\n")
    )
    heading = "All titles:"
    if rng.random() < 0.5:
        heading = "Liked titles:"
        lines = [line for line, event in zip(lines, shown, strict=False) if event.rating >= POSITIVE_RATING]
    heading_ids = tokenizer(heading, add_special_tokens=False)["input_ids"]
    answer = tokenizer("\n".join(["", *lines]), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    prompt_ids = np.concatenate([rendered.token_ids, np.array(heading_ids, np.int32)])
    return Example(prompt_ids, np.array(answer, np.int32))


def make_lore_examples(items: list[Entity], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Exercises in the lore, which answers practise little: say what some titles are about."""
    examples = []
    for start in range(0, len(items), LORE_TITLES):
        titles = [str(item.attributes["title"]) for item in items[start : start + LORE_TITLES]]
        prompt = [{"role": "user", "content": "\n".join(["What are these titles about?", *titles])}]
        prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        lines = []
        for title in titles:
            lore = title_themes(title)
            lines.append(f"{title}: about {THEMES[lore.main].name}, with {THEMES[lore.undertone].name}")
        answer = tokenizer("\n".join(lines), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        examples.append(Example(np.array(prompt_ids, np.int32), np.array(answer, np.int32)))
    return examples


def batches(pool: list[Example], tokens_per_batch: int, rng: np.random.Generator) -> list[list[Example]]:
    """Batches of examples of similar length, in random order."""
    order = rng.permutation(len(pool))
    shuffled = sorted((pool[index] for index in order), key=len)
    made, current = [], []
    for example in shuffled:
        if current and (len(current) + 1) * len(example) > tokens_per_batch:
            made.append(current)
            current = []
        current.append(example)
    made.append(current)
    return [made[index] for index in rng.permutation(len(made))]
