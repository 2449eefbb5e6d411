"""Where a token of a text came from: the codes that drafts, records and reports share."""

# `target` is the model's own choice: a plain step, a correction or a bonus token. The others drafted it.
SOURCE_TARGET, SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_POOL = range(5)
SOURCE_NAMES = ("target", "previous", "prompt", "output", "pool")
NUM_SOURCES = len(SOURCE_NAMES)
