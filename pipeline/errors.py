"""Every error of the pipeline that a user can fix, in one place.

LaserbatchError      also the base of `PoolError` (pools) and `CtrError` (CTR training)
+-- TableError       an input table is missing, malformed or inconsistent
+-- ConfigError      a setting, template or date is not valid
+-- ModelError       a model cannot be loaded, or its attention cannot be packed
+-- WorkspaceError   a folder is no workspace, or the workspace is damaged or of another version
|   +-- WorkspaceBusy  another process holds the workspace's lock
|   +-- NotDelivered   the place that runs are copied to cannot be read or written
+-- NotReached       the service of a URI does not answer, or tables at a URI cannot be read whole
+-- RowError         one row cannot be processed; the row goes to quarantine and the run continues
+-- RunFailed        a run cannot continue, such as when most of a night's first texts fail or it reaches its cost limit
    +-- RunHeld      the night is complete, but a gate keeps it from being published
    +-- EndpointGone the server that writes the texts does not answer
    +-- ClusterFailed  Ray does not start, has no room for workers, or keeps losing their processes
"""

from pydantic import ValidationError

from laserbatch.retrieval_pools.errors import LaserbatchError


def first_line(error: Exception) -> str:
    """The first line of another library's error, without its full stop, for our messages; its type if it is empty.

    The first line of a pydantic error only counts the faults, so the message of the first fault is used instead.
    """
    if isinstance(error, ValidationError):
        return error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")[:200].removesuffix(".")
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].removesuffix(".")


class TableError(LaserbatchError):
    """An input table is missing, malformed or inconsistent."""


class ConfigError(LaserbatchError):
    """A setting, a template or a date is not valid."""


class ModelError(LaserbatchError):
    """A model cannot be loaded, or its attention cannot be packed."""


class WorkspaceError(LaserbatchError):
    """A folder is no workspace, or the workspace is damaged or of another version."""


class WorkspaceBusy(WorkspaceError):
    """Another process holds the workspace's lock."""


class NotDelivered(WorkspaceError):
    """The place that published runs are copied to cannot be read or written; the same command tries again."""

    may_pass = False  # True: a service failed, and nothing is known that must be changed before the next try


class NotReached(LaserbatchError):
    """The service of a URI does not answer, or tables at a URI cannot be read whole; the same command tries again."""

    may_pass = False  # as in `NotDelivered`


class RowError(LaserbatchError):
    """One row cannot be processed; the reason begins with a fixed word, such as "too-long", "loops" or "unparsable"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RunFailed(LaserbatchError):
    """A run cannot continue: most of a night's first texts fail, the cost limit is reached, or the like."""


class RunHeld(RunFailed):
    """A night is complete, but a gate keeps it from being published."""


class ClusterFailed(RunFailed):
    """Ray does not start, has no room for workers, or keeps losing processes; the same command resumes the run."""


class EndpointGone(RunFailed):
    """The server that writes a night's texts does not answer; once it does, the same command resumes the run."""
