"""Sampling by name: each request's revision is leased while its rows run, and cold ones come while others are sampled.

A name is resolved once, at the beginning, to an immutable revision, and that is what its completions say they are from
(law 7). What is resident is sampled at once; between its steps, never inside one, arrived adapters are written into their
slots; they are sampled next, as one batch of all that is there by then. A revision that waits for a slot gets one when the
rows before it have ended, so a call may name more revisions than there are slots.
"""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.rollout.engine import Completion, DenseEngine, Request


class Held(Protocol):
    """A lease on a slot."""

    slot: Slot

    def release(self) -> None: ...


class Residents(Protocol):
    """What is asked of residency: see ``residency.Residency``."""

    @property
    def stacks(self) -> Stacks: ...

    def acquire(self, digest: str, tenant: str) -> "Future[Any]": ...

    def commit_ready(self, budget_bytes: int | None = None) -> int: ...

    def wait_ready(self, pending: Sequence[Future]) -> bool: ...


class NamedSampler:
    """An engine that samples revisions by name. For one thread, the one that owns the device.

    Args:
        engine: samples.
        residency: holds the adapters.
        resolve: name -> digest of the revision it means now; None where names are digests.
        commit_bytes: bytes written into slots between two steps, about; None is all that is there.

    Raises:
        UserError: the engine's base is spread over several processes: their loads would end at different steps.
    """

    def __init__(
        self, engine: DenseEngine, residency: Residents, resolve: Callable[[str], str] | None = None, commit_bytes: int | None = None
    ):
        if (count := multihost.count()) > 1:
            raise UserError(f"sampling by name is for an engine of one process, here are {count}: load adapters before sampling")
        self.engine, self.residency, self.commit_bytes = engine, residency, commit_bytes
        self._resolve = resolve or (lambda name: name)

    def generate(self, requests: Sequence[Request], names: Sequence[str | None], tenant: str = "default") -> list[list[Completion]]:
        """Samples every request from the revision that its name means; results in the order of the requests.

        Args:
            requests: ``adapter`` and ``revision`` are filled in here.
            names: one a request; None samples the bare base.
            tenant: whose quotas count.

        Raises:
            UserError: a request that the engine refuses, or a revision that cannot be loaded; the other rows are lost, too.
            QueueFull: residency's, with the time after which to ask again.
            No lease is left in either case.
        """
        digest_of = {name: self._resolve(name) for name in dict.fromkeys(names) if name is not None}
        rows = [None if name is None else digest_of[name] for name in names]
        for request, _ in zip(requests, rows, strict=True):
            self.engine.check(dataclasses.replace(request, adapter=None), {})
        out: list[list[Completion]] = [[] for _ in requests]
        futures: dict[str, Future[Any]] = {}
        waiting = set(range(len(requests)))
        try:
            for digest in digest_of.values():
                if digest not in futures:
                    futures[digest] = self.residency.acquire(digest, tenant)
            while waiting:
                ready = sorted(i for i in waiting if (d := rows[i]) is None or futures[d].done())
                if not ready:
                    if not self.residency.commit_ready():
                        self.residency.wait_ready(list(futures.values()))
                    continue
                for i, completions in zip(ready, self._sample([(requests[i], rows[i]) for i in ready], futures), strict=True):
                    out[i] = completions
                waiting.difference_update(ready)
                for digest in {d for i in ready if (d := rows[i]) is not None}:
                    futures.pop(digest).result().release()
        except BaseException:
            for future in futures.values():
                if not future.cancel() and future.exception() is None:
                    future.result().release()
            raise
        return out

    def _sample(self, rows: Sequence[tuple[Request, str | None]], futures: dict[str, "Future[Any]"]) -> list[list[Completion]]:
        """Samples rows whose revisions are all resident, and commits meanwhile."""
        slots: dict[str | None, Slot | None] = {d: futures[d].result().slot for _, d in rows if d is not None} | {None: None}
        placed = [dataclasses.replace(request, adapter=slots[digest], revision=digest) for request, digest in rows]
        return self.engine.generate(placed, self.residency.stacks, between_steps=lambda: self.residency.commit_ready(self.commit_bytes))
