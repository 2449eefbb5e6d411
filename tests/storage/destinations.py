"""Places of deliveries and tables in tests: a folder with a URI, and an S3-compatible server on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URI of an empty bucket on a server for this session."""
    import pyarrow.fs as pafs
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patched:
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        patched.setenv("AWS_ACCESS_KEY_ID", "planted-key-id")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patched.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        try:
            made_by = pafs.S3FileSystem(
                endpoint_override=f"http://{host}:{port}", region="us-east-1", allow_bucket_creation=True
            )
            made_by.create_dir("nights")
            yield "s3://nights"
        finally:
            server.stop()


@contextmanager
def refusing_server(status: int, code: str) -> Iterator[str]:
    """The URL of a server that answers each request as S3 refuses one; answers to HEAD have no body."""

    class Refusing(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = "" if self.command == "HEAD" else f"<Error><Code>{code}</Code><Message>x</Message></Error>"
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_HEAD = do_PUT = do_POST = refuse

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A URI with nothing below it."""
    if request.param == "file":
        return f"file://{tmp_path}/there"
    return f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
