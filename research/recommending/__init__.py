"""Lists of items by generative recommendation: semantic ids, beam search over them, drafted and verified."""
