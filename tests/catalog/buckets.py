"""An S3 server on loopback (moto) that fails on demand: it answers with errors, stalls, or hangs
up.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import boto3
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

BUCKET = "payloads"
# of method and path: a status, "hang up", seconds, or nothing
Fault = Callable[[str, str], int | str | float | None]
NAMES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class FaultyServer:
    """The server's WSGI application; ``fault`` may be set at any time."""

    def __init__(self):
        self.fault: Fault = lambda method, path: None
        self._app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, True, request_handler=MotoRequestHandler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        fault = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "hang up":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if type(fault) is not int:
            return self._app(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        text = (
            f"<Error><Code>{NAMES[fault]}</Code><Message>asked to fail</Message></Error>".encode()
        )
        start_response(f"{fault} asked to fail", [("Content-Length", str(len(text)))])
        return [text]


@contextlib.contextmanager
def s3_server() -> Iterator[FaultyServer]:
    """A server with one empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    made = FaultyServer()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    keys["region_name"] = "us-east-1"
    boto3.client("s3", endpoint_url=made.url, **keys).create_bucket(Bucket=BUCKET)
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


def environment(url: str) -> dict[str, str]:
    """What a process needs to reach the server, and nothing to wait for."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
