"""Where a token of a text came from: the codes that drafts, records and reports share."""

# `target` is the model's own choice: a plain step, a correction or a bonus token. The others drafted it: the next four
# from texts, then what the target's own distribution said beside a prompt, guesses of lookahead decoding, small models
# and heads trained for the target. `form`: the grammar of the answer allowed no other token.
SOURCE_TARGET, SOURCE_PREVIOUS, SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_POOL = range(5)
SOURCE_ALIGNED, SOURCE_LOOKAHEAD, SOURCE_MODEL, SOURCE_HEAD, SOURCE_FORM = range(5, 10)
SOURCE_NAMES = ("target", "previous", "prompt", "output", "pool", "aligned", "lookahead", "model", "head", "form")
NUM_SOURCES = len(SOURCE_NAMES)
NUM_TEXT_SOURCES = SOURCE_POOL + 1  # those that pools know, and calibrate
