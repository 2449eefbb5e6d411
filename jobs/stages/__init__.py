"""The stages of a night: opening its run, each stage in order, publication."""
