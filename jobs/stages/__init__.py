"""A night: the opened run, its stages in order, publication."""
