"""A night: the opened run, its stages in order, and what decides whether readers see it."""
