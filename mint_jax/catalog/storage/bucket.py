"""Packs in a bucket (``s3://``, ``gs://``) or in this process's memory (``memory://``), through
TensorStore.

One object is one request, atomic and durable when answered. A long pack is written in parts, so
neither side holds it whole and no request reaches a size limit; the last part commits it.
"""

import collections
import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorstore as ts

from mint_jax.catalog.storage import pack_format
from mint_jax.catalog.storage.pack_format import (
    Name,
    PackDamaged,
    PackMissing,
    Piece,
    StorageFailed,
)
from mint_jax.errors import UserError

PART = 8 << 20  # bytes of one request to write
PARALLEL = 3  # requests of one writer in flight
READS = 8  # pieces of one caller's reads in flight, of at most PART bytes each


class Bucket:
    """Packs under a prefix of a bucket, or in this process's memory.

    Credentials and endpoint come from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
    (or another way of the AWS tools), AWS_ENDPOINT_URL, AWS_REGION; for ``gs://`` the Google
    application default credentials.

    Args:
        timeout: seconds until a request, with all its retries, fails.
    """

    def __init__(self, url: str, scheme: str, bucket: str, path: str, timeout: float):
        self.url = url.rstrip("/")
        self._timeout = timeout
        self._endpoint = ""
        spec: dict[str, Any] = {"path": f"{path}/" if path else "", "bucket": bucket}
        if scheme == "memory":
            spec = {"driver": "memory", "path": f"{bucket}/{spec['path']}"}
        elif scheme == "gs":
            spec |= {"driver": "gcs", "context": {"gcs_request_retries": _retries(timeout)}}
        else:
            spec |= {"driver": "s3", "context": {"s3_request_retries": _retries(timeout)}}
            spec |= self._s3_options()
        context = _MEMORY if scheme == "memory" else None
        try:
            self._store = ts.KvStore.open(spec, context=context).result(timeout)
        except (ValueError, TimeoutError) as error:
            raise self._explain(error, "open") from None

    def _s3_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        given = os.environ.get
        region = given("AWS_REGION") or given("AWS_DEFAULT_REGION")
        self._endpoint = given("AWS_ENDPOINT_URL_S3") or given("AWS_ENDPOINT_URL") or ""
        if self._endpoint:
            options["endpoint"] = self._endpoint.rstrip("/")
            region = region or "us-east-1"  # other servers ignore it, but the signature needs one
        if region:
            options["aws_region"] = region
        if given("AWS_ACCESS_KEY_ID"):  # else every opening warns about missing ~/.aws files
            options["aws_credentials"] = {"type": "environment"}
        return options

    def writer(self, stem: str) -> "_BucketWriter":
        return _BucketWriter(self, stem, PART)

    def start(self, key: str, data: bytes | None) -> ts.Future:
        """Starts writing an object, or deleting it if ``data`` is None."""
        return self._store.write(key, data)

    def wait(self, future: Any, doing: str) -> Any:
        """Returns a request's result. Raises ``UserError``: it failed or timed out; after a timeout
        it may still arrive.
        """
        try:
            return future.result(timeout=self._timeout)
        except (ValueError, TimeoutError, OSError, KeyError) as error:
            future.cancel()
            raise self._explain(error, doing) from None

    def read(self, pieces: Iterable[Piece]) -> Iterator[np.ndarray]:
        waiting: collections.deque[tuple[str, int, int, Any]] = collections.deque()
        for key, begin, end in pieces:
            if len(waiting) == READS:
                yield self._finish(*waiting.popleft())
            future = self._store.read(key, byte_range=slice(begin, end))
            waiting.append((key, begin, end, future))
        while waiting:
            yield self._finish(*waiting.popleft())

    def _finish(self, key: str, begin: int, end: int, future: Any) -> np.ndarray:
        found = self.wait(future, f"read {key} of")
        if found.state == "missing":
            raise PackMissing(
                f"{key} is not in {self.url}: resolve the revision again, or check the bucket's"
                " name and path"
            )
        if len(found.value) != end - begin:
            raise PackDamaged(
                f"{key} in {self.url} gave {len(found.value)} bytes for [{begin}, {end}): it was"
                " cut off"
            )
        return np.frombuffer(found.value, np.uint8)

    def changed(self, key: str, generation: bytes | None) -> tuple[bytes | None, bytes | None]:
        """Returns an object's bytes and generation; bytes None if that is still ``generation``;
        twice None if it is missing.
        """
        unless: Any = {} if generation is None else {"if_not_equal": generation}
        found = self.wait(self._store.read(key, **unless), f"read {key} of")
        if found.state == "missing":
            return None, None
        if found.state == "unspecified":  # the condition does not hold
            return None, generation
        return bytes(found.value), found.stamp.generation

    def list(self, prefix: str) -> Iterator[str]:
        after = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ""
        keys = self.wait(self._store.list(ts.KvStore.KeyRange(prefix, after)), "list")
        yield from sorted(key.decode(errors="replace") for key in keys)

    def delete(self, key: str) -> None:
        self.wait(self.start(key, None), f"delete {key} of")

    def _explain(self, error: Exception, doing: str) -> UserError:
        """Returns an error with reason and remedy in one line."""
        text = str(error).split("\n", 1)[0].split(" [", 1)[0].strip()[:300] or type(error).__name__
        where = f"{self.url}{f' at {self._endpoint}' if self._endpoint else ''}"
        if "OUT_OF_RANGE" in text:
            return PackDamaged(
                f"cannot {doing} {where}: an object is shorter than its pack's name says ({text})"
            )
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._timeout:g} s"
        remedies = (remedy for signs, remedy in _REMEDIES if any(sign in text for sign in signs))
        return StorageFailed(
            f"cannot {doing} {where} ({text}): {next(remedies, 'check the URL and the log')}"
        )


_MEMORY = ts.Context()  # memory://name is the same everywhere in this process
_REMEDIES = (  # by signs in an error
    (
        ("no answer within",),
        "check that the storage is up and AWS_ENDPOINT_URL right, or raise the timeout",
    ),
    (("NoSuchBucket", "bucket does not exist"), "create the bucket, or correct the URL"),
    (
        ("PERMISSION_DENIED", "UNAUTHENTICATED", "AccessDenied", "InvalidAccessKeyId")
        + ("SignatureDoesNotMatch",),
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (gs: GOOGLE_APPLICATION_CREDENTIALS) to"
        " credentials with rights on it",
    ),
    (("CURL",), "check the network and AWS_ENDPOINT_URL"),
)


class _BucketWriter:
    """Writes equal parts as they fill up; the last one has the pack's name and commits it."""

    def __init__(self, bucket: Bucket, stem: str, part: int):
        self._bucket = bucket
        self._stem = stem
        self._part = part
        self._filling = bytearray()
        self._parts = 0
        self._under_way: list[Any] = []

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        while len(self._filling) + len(view) > self._part:  # the last part is never empty
            taken = self._part - len(self._filling)
            self._filling += view[:taken]
            view = view[taken:]
            self._wait(PARALLEL - 1)
            key = pack_format.part_key(self._stem, self._parts)
            self._under_way.append(self._bucket.start(key, bytes(self._filling)))
            self._parts += 1
            self._filling.clear()
        self._filling += view

    def _wait(self, remaining: int) -> None:
        """Waits until at most that many requests are in flight."""
        while len(self._under_way) > remaining:
            self._bucket.wait(self._under_way.pop(0), "write to")

    def commit(self, size: int) -> Name:
        name = Name(self._stem, size, self._part if self._parts else 0)
        self._wait(0)
        # if the last request fails, it may still arrive: the parts stay until gc or a sweep
        self._parts = 0
        self._bucket.wait(self._bucket.start(name.key, bytes(self._filling)), "write to")
        return name

    def abort(self) -> None:
        # stops at the first failure; a sweep removes the rest
        with contextlib.suppress(UserError):
            self._wait(0)
            for i in range(self._parts):
                self._bucket.delete(pack_format.part_key(self._stem, i))


def _retries(timeout: float) -> dict[str, Any]:
    """Retries whose pauses (0.1 s doubling to 2 s, plus as much at random) fit in the timeout."""
    count = max(2, 4 + math.floor((timeout - 6) / 3))
    return {"max_retries": count, "initial_delay": "100ms", "max_delay": "2s"}
