"""The errors of CTR training that a user can fix."""

from laserbatch.retrieval_pools.errors import LaserbatchError


class CtrError(LaserbatchError):
    """Tables, features or settings from which no CTR model can be trained or judged."""


class NothingToJudge(CtrError):
    """Too few interactions follow the date yet: waiting, or an earlier date, may help."""
