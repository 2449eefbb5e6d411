"""From a model folder to forwards over batches."""
