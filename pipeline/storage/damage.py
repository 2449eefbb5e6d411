"""What earlier nights left, where tonight's can do without: what is damaged is named in a warning and passed over."""

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from laserbatch.pipeline.errors import ConfigError, WorkspaceError

logger = logging.getLogger("laserbatch.storage")

Read = TypeVar("Read")
Otherwise = TypeVar("Otherwise")


def unless_damaged(read: Callable[[], Read], otherwise: Otherwise = None) -> Read | Otherwise:
    """What a function reads from a file, or `otherwise` where its error, which names the file, says that it cannot."""
    try:
        return read()
    except (WorkspaceError, ConfigError, OSError) as error:
        _warn_once(str(error))
        return otherwise


@cache
def _warn_once(line: str) -> None:
    logger.warning("%s This goes on without it.", line)
