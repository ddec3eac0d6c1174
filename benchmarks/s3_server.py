"""An S3 server on loopback for benches: moto's, in a process of its own, with one empty bucket."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

BUCKET = "bench"
START_S = 60.0


def lacking() -> str | None:
    """What to install for it; None where all is there."""
    missing = [
        name for name in ("moto", "boto3", "flask") if importlib.util.find_spec(name) is None
    ]
    return (
        f"{', '.join(missing)} not installed: pip install 'moto[server]' boto3" if missing else None
    )


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Runs the server for as long as the block does; gives ``s3://bucket``. The environment of this
    process points at it.

    Raises:
        RuntimeError: it does not start.
    """
    import boto3

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # it complains where they are not
        **dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull),
    }
    before = {name: os.environ.get(name) for name in keys}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        os.environ.update(keys)
        _wait(port, server)
        boto3.client(
            "s3", endpoint_url=keys["AWS_ENDPOINT_URL"], region_name="us-east-1"
        ).create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}"
    finally:
        server.kill()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _wait(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"moto's S3 server on port {port} did not start")
        time.sleep(0.1)


def objects() -> list[tuple[str, int]]:
    """Key and size of everything in the bucket."""
    import boto3

    pages = boto3.client(
        "s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1"
    ).get_paginator("list_objects_v2")
    return [
        (one["Key"], one["Size"])
        for page in pages.paginate(Bucket=BUCKET)
        for one in page.get("Contents", [])
    ]
