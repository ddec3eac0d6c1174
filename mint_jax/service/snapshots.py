"""Policies in training as they were at one moment, to be sampled from by their digest for as long as anyone holds them.

A snapshot is a revision like any other: packed bytes that residency fetches, verifies and brings to a slot. It lies in memory, in no
catalog; updates that follow do not change it. The loop only copies the adapter to the host; packing and hashing are done beside it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from mint_jax.catalog.packed import Schema, as_bytes, digest_of, pack
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.service.training import Training
from mint_jax.train.held import Held


class Snapshots:
    """Snapshots of the policies of one ``Training``.

    Args:
        below: where revisions are fetched from that are none of these, a catalog's say.
    """

    def __init__(self, training: Training, below: Callable[[str], np.ndarray] | None = None):
        self.training, self._below = training, below
        self._held: dict[str, tuple[np.ndarray, int]] = {}  # digest -> packed bytes, holders
        self._lock = threading.Lock()
        self._packing = ThreadPoolExecutor(1, "snapshots")

    def take(self, policy: str, tenant: str = "") -> "Future[str]":
        """The digest of a policy as it is once all that was asked of it before has run; held until ``drop``.

        The future raises a ``UserError`` where the policy is not in training.
        """
        taken: Future[str] = Future()

        def pack_it(asked: "Future[Held]") -> None:
            try:
                taken.set_result(self._add(asked.result()))
            except BaseException as reason:
                taken.set_exception(reason)

        asked = self.training.do(policy, lambda live: live.adapter(policy), tenant)
        asked.add_done_callback(lambda asked: self._packing.submit(pack_it, asked))
        return taken

    def _add(self, held: Held) -> str:
        live = self.training.live
        config = lora_tree.spelled_out(held.config, live.specs)
        data = as_bytes(pack(held.adapter(), Schema(live.base.fingerprint, config)))
        digest = digest_of(data)
        with self._lock:
            self._held[digest] = data, self._held.get(digest, (data, 0))[1] + 1
        return digest

    def fetch(self, digest: str) -> np.ndarray:
        """A snapshot's packed bytes, for residency.

        Raises:
            UserError: nobody holds it, and it is nowhere else.
        """
        with self._lock:
            found = self._held.get(digest)
        if found is not None:
            return found[0]
        if self._below is None:
            raise UserError(f"revision {digest[:16]} is no snapshot that is held here: save the policy's weights again")
        return self._below(digest)

    def drop(self, digest: str) -> None:
        """Ends one hold; the last one's end forgets the bytes. Requests that have it in a slot go on."""
        with self._lock:
            data, holders = self._held[digest]
            if holders > 1:
                self._held[digest] = data, holders - 1
            else:
                del self._held[digest]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        with self._lock:
            return sum(data.nbytes for data, _ in self._held.values())

    def close(self) -> None:
        """Ends the thread that packs."""
        self._packing.shutdown()
