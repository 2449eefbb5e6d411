"""Pools of earlier texts: built, routed, queried for drafts. Knows neither torch nor ray (grouping/lightgcn excepted)."""
