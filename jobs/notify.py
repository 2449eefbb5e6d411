"""Sends a night's summary to a URL when the night ends, also if it fails.

The whole URL is a secret (webhooks have their key in the path), so messages show only its host.
"""

import base64
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import typer

from laserbatch.jobs.failures import failure_object
from laserbatch.pipeline.errors import ConfigError

logger = logging.getLogger("laserbatch")

TIMEOUT_S = 10.0
_ABOUT = "When the command ends, also if it fails, its summary is sent to this URL (POST, JSON)."
NOTIFY_URL = typer.Option(None, "--notify-url", metavar="URL", envvar="LASERBATCH_NOTIFY_URL", help=_ABOUT)


@contextmanager
def notified(url: str | None, **facts: Any) -> Iterator[dict[str, Any]]:
    """Send `facts`, the exit code, and the mapping that the block fills, or its error. Without a URL, send nothing.

    If sending fails, a warning is logged. Raises ConfigError if the URL is not an HTTP URL.
    """
    result: dict[str, Any] = {}
    if url is None:
        yield result
        return
    parts = _parsed(url)
    try:
        yield result
    except BaseException as error:
        _send(parts, facts | failure_object(error, names_values=False))
        raise
    _send(parts, facts | {"exit_code": 0} | result)


def _parsed(url: str) -> SplitResult:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise ConfigError("the value of --notify-url is not a URL; expected http://HOST/PATH or https://HOST/PATH")


def _send(parts: SplitResult, payload: dict[str, Any]) -> None:
    """POST the payload; a slow name server or server delays the night by no more than the timeout."""
    problems = ["no answer in time"]

    def post() -> None:
        try:
            build_opener(_NoRedirects).open(_request(parts, payload), timeout=TIMEOUT_S).close()
            problems.clear()
        except HTTPError as error:
            problems[:] = [f"HTTP status {error.code}"]
        except TimeoutError:  # the socket may time out just before the wait for this thread
            pass
        except Exception as error:  # its message may contain the URL
            cause = error.reason if isinstance(error, URLError) else error
            problems[:] = [getattr(cause, "strerror", None) or type(cause).__name__]

    thread = Thread(target=post, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    for problem in problems:
        logger.warning("the notification was not sent to %s: %s", parts.hostname, problem)


def _request(parts: SplitResult, payload: dict[str, Any]) -> Request:
    """The request; user and password of the URL become a header, since `urllib` takes them for a part of the host."""
    account, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json"}
    if account:
        token = base64.b64encode(unquote(account).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    url = parts._replace(netloc=host, fragment="").geturl()
    return Request(url, json.dumps(payload, default=str, ensure_ascii=False).encode(), headers, method="POST")


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: urllib would send the credentials, without the payload, to another host."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return None
