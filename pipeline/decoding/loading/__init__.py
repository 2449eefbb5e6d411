"""From a model folder to a model that the engine can run."""
