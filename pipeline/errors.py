"""Every error of the pipeline that a user can fix, in one place.

LaserbatchError      of the pools (`PoolError`) and of CTR training (`CtrError`) too
+-- TableError       an input table is missing, malformed or inconsistent
+-- ConfigError      a setting, template or date that is not one
+-- ModelError       a model that cannot be loaded or packed
+-- WorkspaceError   a workspace of another version, damaged, or not one
|   +-- WorkspaceBusy  another process holds its lock
+-- RowError         one row that cannot be done; the row goes to quarantine and the run goes on
+-- RunFailed        most of a night's first texts cannot be kept, or their cost would pass its limit
    +-- RunHeld      the night is done, and a gate keeps it from being published
    +-- EndpointGone the server that writes the texts does not answer
    +-- ClusterFailed  Ray does not start, has no room for workers, or loses their processes again and again
"""

from pydantic import ValidationError

from laserbatch.retrieval_pools.errors import LaserbatchError


def first_line(error: Exception) -> str:
    """The first line of what another library says, without its full stop, or its type; for a message of ours.

    The first line of pydantic's error only counts what is wrong, so its first message takes that place.
    """
    if isinstance(error, ValidationError):
        return error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")[:200].removesuffix(".")
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].removesuffix(".")


class TableError(LaserbatchError):
    """An input table is missing, malformed or inconsistent."""


class ConfigError(LaserbatchError):
    """A setting, a template or a date is not what it should be."""


class ModelError(LaserbatchError):
    """A model cannot be loaded, or its attention cannot be packed."""


class WorkspaceError(LaserbatchError):
    """A workspace is of another version, damaged, or not a workspace."""


class WorkspaceBusy(WorkspaceError):
    """Another process holds the workspace's lock."""


class RowError(LaserbatchError):
    """One row cannot be done; the reason begins with a stable word: "too-long", "unparsable", "undecodable"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RunFailed(LaserbatchError):
    """Most of a night's first texts cannot be kept, or their cost would pass its limit; the others are not written."""


class RunHeld(RunFailed):
    """A night is done, but a gate keeps it from being published."""


class ClusterFailed(RunFailed):
    """Ray does not start, has no room for workers, or loses processes again and again; the same command goes on."""


class EndpointGone(RunFailed):
    """The server that writes a night's texts does not answer; the same command goes on when it does."""
