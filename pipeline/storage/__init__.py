"""Reading and writing Parquet, manifests, the workspace and quarantine."""
