"""Loading of model folders, and forwards over batches."""
