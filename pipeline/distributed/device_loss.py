"""How a worker ends whose GPU it can no longer use, so that Ray puts another process in its place."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def ends_process_if_device_is_lost() -> Iterator[None]:
    """End this process after a CUDA error that every later call would meet too; other errors are raised as they are.

    Ray starts another process, and what this one was given is done again.
    """
    try:
        yield
    except Exception as error:
        from laserbatch.pipeline.decoding.device_memory import is_device_lost  # torch is loaded by now

        if not is_device_lost(error):
            raise
        logger.exception("the CUDA device is lost: this worker ends")
        os._exit(1)
