"""A night's work list: what is asked about whom, who is carried over, and in which shard the others are written."""
