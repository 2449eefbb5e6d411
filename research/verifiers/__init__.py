"""Rules of acceptance beside greedy and relaxed ones."""
