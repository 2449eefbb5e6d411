"""Configuration files that ship with the package; YAML only."""
