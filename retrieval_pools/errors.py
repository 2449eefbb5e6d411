"""What of the pools a user can fix."""


class PoolError(Exception):
    """A pool, a router or a pool store is missing, damaged, or built for something else.

    The message says what was found, what was expected and which command rebuilds it.
    """
