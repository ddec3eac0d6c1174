"""Slow clients over real sockets: they are cut, and others are served meanwhile."""

import asyncio
import contextlib
import queue
import socket
import threading
import time
import types
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from mint_jax.service.app import Web
from mint_jax.service.connections import TimedProtocol
from mint_jax.service.gate import Gate, Limits
from mint_jax.service.keys import Keys, add

HEAD_S, BODY_S, STALL_S = 0.5, 0.5, 0.5
HEAD = b"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\n"


async def size(request):
    return PlainTextResponse(str(len(await request.body())))


@contextlib.contextmanager
def serving(app, **limits):
    """The port of a server of the app, in a thread."""
    protocol, up = type("Protocol", (TimedProtocol,), limits), queue.SimpleQueue()
    polls: Any = types.SimpleNamespace(end_waits=lambda: None)
    web = Web(polls, app, "127.0.0.1", 0, up.put, http=protocol)
    thread = threading.Thread(target=web.run)
    thread.start()
    try:
        yield up.get(timeout=30)
    finally:
        web.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def ended():
    """Set once nobody reads the stream at ``/endless``."""
    return threading.Event()


@pytest.fixture(scope="module")
def port(ended):
    async def endless(request):
        async def parts():
            try:
                while True:
                    await asyncio.sleep(0)
                    yield b"x" * 65536
            finally:
                ended.set()

        return StreamingResponse(parts())

    sizes = Route("/api/v1/asample", size, methods=["POST"])
    app = Starlette(routes=[sizes, Route("/endless", endless)])
    gate = Gate(app, None, Limits(body_bytes=1 << 20, body_s=BODY_S))
    with serving(gate, head_s=HEAD_S, stall_s=STALL_S) as port:
        yield port


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def all_of(connection):
    """What comes until the other side closes."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            got += part
    return got


def drip(connection, data, until_s=20.0):
    """Sends byte by byte, until the other side has had enough; says so."""
    until = time.monotonic() + until_s
    for i in range(len(data)):
        try:
            connection.sendall(data[i : i + 1])
        except OSError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return False


def test_slow_heads_and_bodies_are_cut_while_others_are_served(port):
    done = {}

    def slowly(name, first, data):
        with connected(port) as connection:
            connection.sendall(first)
            done[name] = drip(connection, data)

    slow = {
        "head": (b"", HEAD + b"X-Long: " + b"a" * 100_000),
        "second head": (HEAD + b"Content-Length: 1\r\n\r\nx", HEAD + b"X-Long: " + b"a" * 100_000),
        "body": (HEAD + b"Content-Length: 100000\r\n\r\n", b"a" * 100_000),
        "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 100_000),
        "open": (
            b"POST /api/v1/client/config HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n",
            b"a" * 89 + b" " * 100_000,
        ),
    }
    threads = [
        threading.Thread(target=slowly, args=(name, *what))
        for name, what in slow.items()
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        while True:
            assert client.post("/api/v1/asample", content=b"x" * 100_000).text == "100000"
            if not any(thread.is_alive() for thread in threads):
                break
            time.sleep(0.02)
    assert done == dict.fromkeys(slow, True)


def test_a_slow_body_gets_408(port):
    with connected(port) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert all_of(connection).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_does_not_read_is_cut(port, ended):
    with connected(port) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(30)


GET, EVIL = b"GET /endless HTTP/1.1\r\nHost: ", b"evil.example\r\n"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GET + EVIL, 403),
        (b"GET /endless HTTP/1.0\r\n", 403),  # the only version that may name no host
        # RFC 9112 puts an absolute target above the header
        (b"GET http://evil.example/endless HTTP/1.1\r\nHost: localhost\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n", 400),
        (GET + b"localhost\r\nHost: " + EVIL, 400),
        (GET + EVIL + b"X-Forwarded-Host: localhost\r\nForwarded: host=localhost\r\n", 403),
        (b"POST /api/v1/asample HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 0\r\n", 200),
    ],
)
def test_a_name_turned_to_this_machine_reads_nothing(port, head, status):
    with connected(port) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert all_of(connection).startswith(b"HTTP/1.1 %d " % status)


def test_a_client_that_waits_to_be_told_sends_no_refused_body(tmp_path):
    _, secret = add(tmp_path, "alice", ["sample"])
    app = Gate(Starlette(routes=[Route("/api/v1/asample", size, methods=["POST"])]), Keys(tmp_path))
    head = HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n"
    with serving(app, head_s=30, stall_s=30) as port:
        with connected(port) as connection:
            connection.sendall(head + b"\r\n")
            assert all_of(connection).startswith(b"HTTP/1.1 401 ")
        with connected(port) as connection:
            connection.sendall(head + f"X-API-Key: {secret}\r\nConnection: close\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
            connection.sendall(b"abc")
            assert all_of(connection).endswith(b"\r\n\r\n3")
