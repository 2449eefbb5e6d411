"""A night's work list: the entities that get a new text, with prompt and shard, and the entities that keep theirs."""
