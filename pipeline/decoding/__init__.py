"""The engine: drafts, one packed tree forward, verification. Knows no Ray, no Parquet, no users."""
