"""Training of drafters from texts that a target wrote."""
