"""A file a command: what it takes, which stage it calls, what it prints."""
