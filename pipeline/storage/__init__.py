"""Parquet in and out, manifests, the workspace, quarantine."""
