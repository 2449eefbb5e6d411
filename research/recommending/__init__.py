"""Lists of items by generative recommendation: semantic ids, and beam search over them with verified drafts."""
