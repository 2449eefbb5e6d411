"""Pools built: texts laid end to end, sorted or merged to the order that drafts are searched by."""
