"""Pools as files: texts laid end to end in the order that drafts are searched by, versioned."""
