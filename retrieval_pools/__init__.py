"""Pools of earlier texts: built, routed, queried for drafts. No torch and no ray, but for grouping/lightgcn."""
