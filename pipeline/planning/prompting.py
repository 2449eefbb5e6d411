"""What an entity is asked, and the fingerprint by which its answer stays as long as nothing of that changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from laserbatch.pipeline.decoding.model.folder import load_tokenizer, model_identity
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.knowledge.entities import Entity
from laserbatch.pipeline.knowledge.prompts import RenderedPrompt, fingerprint, render_prompt
from laserbatch.pipeline.knowledge.templates import KnowledgeSettings, load_template
from laserbatch.pipeline.sides import Side


def prompt_renderer(
    side: Side, knowledge: KnowledgeSettings, decoding: DecodingSettings, model_dir: Path
) -> Callable[[Entity], tuple[RenderedPrompt, str]]:
    """A function from an entity to its rendered prompt and fingerprint; it raises `RowError` where there is none."""
    tokenizer = load_tokenizer(model_dir)
    template = load_template(knowledge.template_of(side), knowledge.template_dir)
    model_id = model_identity(model_dir, decoding.adapter)
    provenance = decoding_provenance(decoding)

    def render(entity: Entity) -> tuple[RenderedPrompt, str]:
        rendered = render_prompt(template, entity, tokenizer, knowledge.max_prompt_tokens)
        return rendered, fingerprint(rendered, template, model_id, provenance)

    return render


def decoding_provenance(decoding: DecodingSettings) -> dict[str, Any]:
    """The decoding settings that decide a text: part of its fingerprint and of its record.

    Batch size, threads and the draft budget are left out: they change how fast a text comes, not which text may come.
    """
    names = ("verifier", "top_k", "min_probability", "max_new_tokens", "stop_strings", "dtype")
    dumped = decoding.model_dump(mode="json")
    return {name: dumped[name] for name in names}
