"""Codes for the source of a token; drafts, records and reports share them."""

# `target`: the model's own choice in a plain step, as a correction or as a bonus token. The others drafted the token:
# `previous`, `prompt`, `output` and `pool` from texts; `aligned` from the target's own distribution next to a prompt;
# `lookahead` by lookahead decoding; `model` and `head` by trained ones. `form`: the grammar allowed no other token.
SOURCE_TARGET, SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_POOL = range(5)
SOURCE_ALIGNED, SOURCE_LOOKAHEAD, SOURCE_MODEL, SOURCE_HEAD, SOURCE_FORM = range(5, 10)
SOURCE_NAMES = ("target", "previous", "prompt", "output", "pool", "aligned", "lookahead", "model", "head", "form")
NUM_SOURCES = len(SOURCE_NAMES)
NUM_TEXT_SOURCES = SOURCE_POOL + 1  # the sources that pools draft from and calibrate, and `target`
