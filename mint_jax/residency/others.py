"""Residency where several processes share one mesh: process 0 decides what is loaded, into which
slot and when, the others do the same.

    process 0                                   every other process
    a loader stages, ``staging``   --stage-->   a thread fetches, verifies and stages the same
    revision waits                          <-report--   it is there, or why not between two steps:
    a piece     --write-->   the same piece, before the plan of the next step

Each process reads the storage itself, so its payloads must be where all of them see them; no
adapter travels between processes. What one of them cannot load fails in process 0, to those who
asked for it there.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mint_jax import messages, multihost
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.residency.admission import Admission
from mint_jax.residency.host_cache import HostCache
from mint_jax.residency.host_tier import Fetch, HostTier, Unpack
from mint_jax.residency.metrics import Metrics
from mint_jax.residency.slots import DeviceSlots, Staged

_numbers = itertools.count()  # of adapters on their way


@contextlib.contextmanager
def staging(digest: str, slot: Slot) -> Iterator[int]:
    """In this block process 0 brings an adapter to the device; behind it all others have done so.

    Returns:
        Its number, for ``write``.

    Raises:
        UserError: one of them could not.
    """
    number = next(_numbers)
    messages.tell("stage", number, digest, slot.bucket, slot.index)
    try:
        yield number
        multihost.heed(f"stage/{number}")
    except BaseException:
        abandon(number)
        raise


def write(number: int) -> None:
    """Tells the others to write the next piece."""
    messages.tell("write", number)


def abandon(number: int) -> None:
    """Tells the others that what they staged is not written."""
    messages.tell("abandon", number)


class Others:
    """Residency of a process that is not the first, over slots like those of process 0; a context
    that ends its threads.

    Args:
        fetch, unpack, admission, slots, host_bytes: see ``Residency``.
        workers: threads that load.
    """

    def __init__(
        self,
        fetch: Fetch,
        unpack: Unpack,
        admission: Admission,
        slots: DeviceSlots,
        host_bytes: int,
        workers: int = 4,
    ):
        self.slots = slots
        self._tier = HostTier(HostCache(host_bytes), fetch, unpack, admission, Metrics())
        self._staged: dict[int, Future[Staged]] = {}
        self._workers = ThreadPoolExecutor(workers, "load")

    def __enter__(self) -> "Others":
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown()

    @property
    def stacks(self) -> Stacks:
        """The stacks to sample from; one dict for good, whose arrays writes replace."""
        return self.slots.stacks

    def obey(self, word: str, values: Sequence[Any]) -> None:
        """Does what process 0 tells; between two calls of the engine's programs.

        Raises:
            RuntimeError: a word that is none.
        """
        if word == "stage":
            self._staged[values[0]] = self._workers.submit(self._stage, *values)
        elif word == "write":  # it is there: process 0 has waited for the report
            if self.slots.write(self._staged[values[0]].result()):
                del self._staged[values[0]]
        elif word == "abandon":
            self._staged.pop(values[0]).cancel()
        else:
            raise RuntimeError(
                f"process 0 tells {word!r}, which no process knows: their programs differ"
            )

    def _stage(self, number: int, digest: str, bucket: int, index: int) -> Staged:
        try:
            with self._tier.lend(digest, "others") as found:
                staged = self.slots.stage(Slot(bucket, index), found.adapter, found.schema.config)
        except Exception as failure:  # process 0 raises it
            multihost.report(f"stage/{number}", str(failure) or type(failure).__name__)
            raise
        multihost.report(f"stage/{number}", None)
        return staged
