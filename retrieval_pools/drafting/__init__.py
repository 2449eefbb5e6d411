"""The compiled part of drafting; `query.draft` calls it. No Python objects, no state, no GIL."""
