"""Engines with the drafter `trained`, set up as by a worker."""

from typing import Any

from laserbatch.pipeline.decoding.drafters import Drafter, drafter_from, load_plugin_drafters
from laserbatch.pipeline.decoding.engine import Engine
from laserbatch.pipeline.decoding.model.load import LoadedModel, load_model
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.research.drafters.draft_models import DraftModels
from laserbatch.research.drafters.options import TrainedOptions


def trained(*others: str, **options: Any) -> dict[str, Any]:
    """Decoding settings with the drafter `trained`, its options, and other drafters before it."""
    return {"drafters": (*others, "trained"), "drafter_options": {"trained": options}}


def loaded_engine(settings: DecodingSettings, model="sample", device: str = "cpu") -> tuple[Engine, Drafter]:
    loaded = load_model(model, settings.dtype, device, settings.adapter)
    return engine_of_loaded(loaded, settings)


def engine_of_loaded(loaded: LoadedModel, settings: DecodingSettings) -> tuple[Engine, Drafter]:
    plugins = load_plugin_drafters(settings, loaded)
    engine = Engine(loaded, settings, drafter_bytes_per_token=sum(plugin.bytes_per_token for plugin in plugins))
    return engine, drafter_from(settings, plugins=plugins, max_tokens=engine.cache.max_tokens)


def drafter_of(small: tuple[LoadedModel, ...], settings: DecodingSettings, pool=None) -> Drafter:
    """The drafter of `settings`, with these small models."""
    models = DraftModels(
        small, (None,) * len(small), options=settings.drafter_options.get("trained") or TrainedOptions()
    )
    return drafter_from(settings, pool, plugins=[models])
