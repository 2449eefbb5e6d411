"""A night's work list: which entities get a new text, from which prompt and in which shard, and which keep theirs."""
