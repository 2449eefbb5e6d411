"""Reading files of earlier nights that tonight can do without: a damaged file is skipped with a warning."""

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from laserbatch.pipeline.errors import ConfigError, WorkspaceError

logger = logging.getLogger("laserbatch.storage")

Read = TypeVar("Read")
Otherwise = TypeVar("Otherwise")


def unless_damaged(read: Callable[[], Read], otherwise: Otherwise = None) -> Read | Otherwise:
    """The result of a function that reads a file; if it raises, warns with its error, and returns `otherwise`."""
    try:
        return read()
    except (WorkspaceError, ConfigError, OSError) as error:
        _warn_once(str(error))
        return otherwise


@cache
def _warn_once(line: str) -> None:
    logger.warning("%s For now, the command continues without it.", line)
