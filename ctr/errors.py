"""The one error of CTR training that a user can fix."""


class CtrError(Exception):
    """Tables, features or settings from which no CTR model can be trained or judged."""
