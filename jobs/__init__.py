"""The command line (`commands/`), the `stages/` of a night, the report and the settings."""
