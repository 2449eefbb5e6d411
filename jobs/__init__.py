"""The command line: one file a command, settings, the report."""
