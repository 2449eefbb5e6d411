"""Before a run: what steps cost here, what budgets gain, how long all of it takes."""
