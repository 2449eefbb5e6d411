"""The report of a run: one self-contained HTML page, made from the manifest alone."""
