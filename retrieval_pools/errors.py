"""The root of every error that a user can fix, and the error of the pools."""


class LaserbatchError(Exception):
    """Root of the errors that a user can fix; its message says what was found, what was expected and what to do."""


class PoolError(LaserbatchError):
    """A pool, a router or a pool store is missing, damaged, or built for something else."""


class OtherPoolFormat(PoolError):
    """A pool is whole, but another version of laserbatch wrote it in its own format."""
