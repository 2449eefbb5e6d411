"""The report of a run: one self-contained HTML page, made only from the manifest."""
