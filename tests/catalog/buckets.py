"""An S3 server on loopback (moto) behind a proxy that fails on demand: it answers with errors,
stalls, or hangs up.
"""

import contextlib
import http.client
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "payloads"
# of method and path: a status, "hang up", seconds, or nothing
Fault = Callable[[str, str], int | str | float | None]
NAMES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class Proxy(ThreadingHTTPServer):
    """Passes requests on to ``target``; ``fault`` may be set at any time, ``requests`` lists what
    came.
    """

    daemon_threads = True

    def __init__(self, target: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.fault: Fault = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path))
        fault = self.server.fault(self.command, self.path)
        if isinstance(fault, float):
            time.sleep(fault)
        if fault == "hang up":
            self.close_connection = True
            return
        if type(fault) is int:
            text = f"<Error><Code>{NAMES[fault]}</Code><Message>told to fail</Message></Error>"
            self._answer(fault, {}, text.encode())
            return
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        self._answer(response.status, dict(response.getheaders()), data)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        own = ("content-length", "connection", "server", "date", "transfer-encoding")
        for name, value in headers.items():
            if name.lower() not in own:
                self.send_header(name, value)
        length = str(len(data))
        if self.command == "HEAD":
            length = headers.get("Content-Length", length)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):  # the name is the base class's
        pass


@contextlib.contextmanager
def s3_server() -> Iterator[Proxy]:
    """A server with one empty bucket, and the proxy before it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    keys["region_name"] = "us-east-1"
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **keys).create_bucket(Bucket=BUCKET)
    proxy = Proxy(f"{host}:{port}")
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.stop()


def environment(url: str) -> dict[str, str]:
    """What a process needs to reach the server, and nothing to wait for."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
