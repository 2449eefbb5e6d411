"""Drafters, one per file; the engine cuts their trees to the budget and verifies them."""

from laserbatch.pipeline.decoding.drafters.drafter import Drafter, NoDrafter, Observation
from laserbatch.pipeline.decoding.drafters.retrieval import RetrievalDrafter, drafter_from, load_plugin_drafters

__all__ = ["Drafter", "NoDrafter", "Observation", "RetrievalDrafter", "drafter_from", "load_plugin_drafters"]
