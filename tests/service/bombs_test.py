"""Bodies that grow when they are read, several kinds at once, against a server in a process of its
own: its memory stays bounded.
"""

import concurrent.futures
import gzip
import itertools
import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import zstandard

from benchmarks.service_client import Served
from mint_jax.service import bodies

pytestmark = pytest.mark.long

BUDGET = 1 << 30  # `bodies_gib` of the job
# frames and windows of six threads, answers, and what malloc keeps of all that: 350 to 950 MB were
# measured
SLACK = 1280 << 20
BODY = 64 << 20


def zstd(unit, size=BODY - 1):
    return zstandard.ZstdCompressor(level=1).compress(unit * (size // len(unit)))


def bombs():
    """Path, headers and body of each kind; some are refused as a whole, others are as large as may
    be and wrong inside.
    """
    JSON, PROTO = {"content-type": "application/json"}, {"content-type": "application/x-protobuf"}
    of_zstd, of_gzip = {"content-encoding": "zstd"}, {"content-encoding": "gzip"}
    values = bodies.VALUES - 10
    numbers = b"1.25," * values + b"0]}}"
    numbers = b'{"model_id":"x","seq_id":1,"forward_backward_input":{"data":[' + numbers
    objects = b'{"model":"x","prompt":[' + b'{"":0},' * (values // 2) + b"{}]}"
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [300] * (values - 20)}]}
    prompt = {"sampling_session_id": "x", "seq_id": 0, "prompt": prompt}
    text = {"model": "x", "prompt": "a" * (BODY - 1000) + "\U0001f600"}
    text = json.dumps(text, ensure_ascii=False).encode()
    return [
        ("/api/v1/forward_backward", JSON | of_zstd, zstd(b"[],", 1 << 28) * 16),  # 4 GB
        ("/api/v1/forward_backward", JSON | of_zstd, zstd(b"[],")),
        ("/v1/completions", JSON | of_zstd, zstd(b'{"":{}},')),
        ("/v1/chat/completions", JSON | of_gzip, gzip.compress(bytes(BODY), 1) * 100),
        ("/api/v1/create_session", JSON | of_zstd, zstd(b"0", 1 << 28)),
        ("/api/v1/forward_backward", JSON | of_zstd, zstandard.compress(numbers)),
        ("/v1/completions", JSON | of_zstd, zstandard.compress(objects)),
        ("/api/v1/asample", JSON | of_zstd, zstandard.compress(json.dumps(prompt).encode())),
        ("/v1/completions", JSON | of_zstd, zstandard.compress(text)),
        ("/api/v1/forward_backward", PROTO | of_zstd, zstd(b"\x1a\x00")),
        ("/api/v1/forward_backward", PROTO | of_zstd, zstd(b"\x1a\x00", 2 * (bodies.FIELDS - 1))),
        ("/api/v1/forward", PROTO, np.zeros(BODY - 1, np.uint8).tobytes()),
    ]


def drip(port, count, until):
    """A body in chunks of two bytes."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = (
            "POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        while count and time.monotonic() < until:
            try:
                connection.sendall(b"2\r\n[]\r\n" * 1000)
            except OSError:
                return
            count -= 1000


def most_rss_bytes(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def test_bodies_of_every_kind_at_once_end_no_server(tmp_path):
    options = {"base": "tiny-random", "port": 0, "slots": 2, "adapters": 2, "ranks": "(8,)"}
    options |= {"shapes": "((1, 1, 32),)", "max_rows": 8}
    served = Served("mint_jax.launch", "configs/serve.py", tmp_path / "server", options)
    try:
        url = served.ready()
        # the highest so far is forgotten
        Path(f"/proc/{served.process.pid}/clear_refs").write_text("5")
        before, answers, until = served.rss_bytes(), [], time.monotonic() + 20
        port = int(url.rpartition(":")[2])
        dripping = [threading.Thread(target=drip, args=(port, 2_000_000, until)) for _ in range(4)]
        for thread in dripping:
            thread.start()
        made = bombs()
        with (
            httpx.Client(base_url=url, timeout=120) as client,
            concurrent.futures.ThreadPoolExecutor(12) as pool,
        ):

            def send(bomb):
                path, headers, body = bomb
                return path, client.post(path, headers=headers, content=body).status_code

            every = itertools.islice(itertools.cycle(made), 3 * len(made))
            for path, status in pool.map(send, every):
                answers.append(status)
                # 408: a busy machine reads a body too slowly
                assert status in (400, 404, 408, 413, 429), (path, status)
            while time.monotonic() < until and any(thread.is_alive() for thread in dripping):
                assert client.get("/health").status_code == 200
                time.sleep(1)
            assert client.get("/ready").status_code == 200
        for thread in dripping:
            thread.join()
        grown = most_rss_bytes(served.process.pid) - before
        counts = {status: answers.count(status) for status in sorted(set(answers))}
        print(f"answers {counts}; {before >> 20} MB before, {grown >> 20} MB more at most")
        assert grown < BUDGET + SLACK
    finally:
        served.kill()
