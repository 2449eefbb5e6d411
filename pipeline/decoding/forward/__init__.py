"""One forward over packed steps: where keys lie, which query sees which, and the attention that computes it."""
