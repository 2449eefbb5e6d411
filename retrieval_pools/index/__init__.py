"""Pools as files, in versions: texts end to end, and the sorted order of their positions that drafts search."""
