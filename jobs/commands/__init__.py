"""One file per command or group of commands: the options, the stages that it calls, and what it prints."""
