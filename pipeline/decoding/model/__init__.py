"""From a model folder to forwards over packed steps."""
