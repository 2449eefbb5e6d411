"""URIs of places that are not on a local disk: opened through pyarrow, and never with a credential in them.

Credentials come only from the standard chain of each service (for S3 the environment, ~/.aws, the machine's role).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard
from urllib.parse import quote

from laserbatch.pipeline.errors import ConfigError, LaserbatchError, NotDelivered, NotReached, first_line

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

BLOCK_BYTES = 8 << 20
MAX_RETRY_S = 60  # if a Google service cannot be reached; its client would retry for a quarter of an hour
# Schemes of services that may be contacted as soon as a URI is opened.
SERVICES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_SECRET_OPTION = re.compile(r"[?&](?!credential_kind)[^=&]*(key|secret|token|passw|credential|sig)[^=&]*=", re.I)
STANDARD_CHAIN = (
    "taken from the standard chain (for s3:// the environment, ~/.aws, the machine's role; for abfss:// "
    "AZURE_CLIENT_ID and what belongs to it, `az login`, a managed identity)"
)
ADVICE = f"Check the URI, that the service can be reached, and its credentials: they are {STANDARD_CHAIN}"
# Parts of libraries' messages for what does not pass by itself, and what to do.
_REFUSALS = {
    r"NO_SUCH_BUCKET|NoSuchBucket|[Bb]ucket ('[^']*' )?(not found|does not exist)|ContainerNotFound": (
        "Create the bucket or container, or correct the URI"
    ),
    r"Unrecognized filesystem type in URI: (az|azure|adl|wasbs?)://": (
        "Azure's URIs are abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
    ),
    # Without a body, S3 says of expired credentials only that the request was bad.
    r"Expired|has expired|HTTP status 400": (
        "The credentials have expired or are malformed. Renew them (after `aws sso login`, `aws configure "
        f"export-credentials --format env` prints them); they are {STANDARD_CHAIN}"
    ),
    r"ACCESS_DENIED|AccessDenied|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT|PERMISSION_DENIED|"
    r"UNAUTHENTICATED|HTTP status 40[13]|403 Forbidden|401 Unauthorized|Error: \[\w+\] 40[13]|Failed to get token": (
        "The credentials are missing or wrong, or do not allow to list, read, write and delete files there; they are "
        f"{STANDARD_CHAIN}"
    ),
}


def is_uri(path: object) -> TypeGuard[str]:
    """Whether `path` is text such as `s3://bucket/prefix`."""
    return isinstance(path, str) and "://" in path


def has_credentials(uri: str) -> bool:
    """Whether a URI contains a password or a key."""
    return bool(re.search(":.*@", uri.partition("://")[2]) or _SECRET_OPTION.search(uri))


def without_credentials(uri: str) -> str:
    """The URI itself. Raises ConfigError, which does not show the URI, if it contains a password or a key."""
    if has_credentials(uri):
        raise ConfigError(
            f"a {uri.partition('://')[0]}:// URI in the configuration or the command has a password or key in it; "
            f"remove it: credentials are {STANDARD_CHAIN}"
        )
    return uri


def filesystem_of(uri: str) -> tuple["FileSystem", str]:
    """The file system of a URI and the path within it.

    Raises ConfigError if pyarrow does not know the URI, and NotReached if its service does not answer.
    """
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem

    escaped = re.sub("%(?![0-9a-fA-F]{2})", "%25", without_credentials(uri))
    opened = quote(escaped, safe="%/:?&=@+,;!$'()*[]")  # names may have spaces, "#" and any letters
    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds=" not in uri:
        opened += f"{'&' if '?' in uri else '?'}retry_limit_seconds={MAX_RETRY_S}"
    try:
        filesystem, path = FileSystem.from_uri(opened)
        if filesystem.type_name == "abfs":
            filesystem.get_file_info(path)  # without credentials, opening a file would end the whole process
    except (OSError, ValueError, ArrowException) as error:  # the last one itself: Azure found no credentials
        kind = ConfigError if isinstance(error, (ValueError, NotImplementedError)) else NotReached
        raise failure(kind, f"{uri} cannot be opened", error) from None
    return filesystem, path.rstrip("/")


@contextmanager
def naming_uri(uri: str, kind: type[LaserbatchError]) -> Iterator[None]:
    """Turn errors of a file system in the block into an error of ours, of type `kind`, which names the URI."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, ArrowException) as error:
        usual = "" if uri.startswith("file:") else ADVICE  # a folder has no credentials
        raise failure(kind, uri, error, usual) from None


def failure(kind: type[LaserbatchError], what: str, error: Exception, usual: str = ADVICE) -> LaserbatchError:
    """An error of type `kind` about that of a service's library; it says what to do, `usual` if no refusal is known."""
    advice = next((advice for found, advice in _REFUSALS.items() if re.search(found, str(error))), usual)
    cause = OSError(re.sub("^.*?(?=Azure Error: |Failed to get token)", "", str(error)))  # Azure's comes after the call
    raised = kind(f"{what}: {first_line(cause)}." + f" {advice}." * bool(advice))
    if isinstance(raised, NotDelivered | NotReached):
        raised.may_pass = bool(usual) and advice is usual
    return raised
