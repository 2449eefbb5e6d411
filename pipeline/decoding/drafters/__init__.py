"""Ways to draft, a file each; the engine cuts their trees to the budget and has them verified."""

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter, Observation
from laserbatch.pipeline.decoding.drafters.named import drafter_from, load_plugin_drafters
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter

__all__ = ["Drafter", "NoDrafter", "Observation", "RetrievalDrafter", "drafter_from", "load_plugin_drafters"]
