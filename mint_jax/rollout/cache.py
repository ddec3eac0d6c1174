"""The cache's pages on the device: how many there are, and which go to the host and come back."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.calls import Calls
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.request import Request
from mint_jax.rollout.schedule import own_pages, pages_needed

CACHE_BYTES = 1 << 30  # on a CPU; on accelerators CACHE_SHARE of the memory that is free
CACHE_SHARE = 0.6
LEAST_PAGES = 16
SWAP_PAGES = 8  # pages of a part that go to or from the host in one call


class Kept(NamedTuple):
    """Contents of pages on the host: their number, see ``calls``, and the part that they were read
    of.
    """

    number: int
    part: int


class Cache:
    """The pool of one base.

    Args:
        rows: rows that decode together at most, over all parts.
        calls: whose pool it is.
        nbytes: of all devices together, at most; None: see ``CACHE_BYTES``.

    Attributes:
        pages: of each part.
        most: of each part, that there may be.

    Raises:
        UserError: ``nbytes`` are not two pages of each part.
    """

    def __init__(self, base: Base, rows: int, calls: Calls, nbytes: int | None):
        self.base, self.calls, self.rows = base, calls, rows
        self.parts = device.page_parts(base.cfg, base.mesh)
        self.pages, self.most = (
            0,
            multihost.agree("pages of the cache", lambda: self._count(nbytes)),
        )

    def hold(self, requests: Sequence[Request] | None) -> bool:
        """Makes it as large as it may be, or large enough for as many samples of these requests as
        there are rows; whether it was made anew, empty.

        One that is large enough stays, and the sizes are few, for each is a shape of the programs.
        """
        wanted = self.most
        if requests is not None:
            # Samples of a prompt share its pages: of a request's samples one brings them, and the
            # others their own. (Counted for each, 32 samples of 8 prompts of SmolLM2 took 189 MB
            # where 94 hold them.)
            longest = sorted(
                (size for r in requests for size in (pages_needed(r), *[own_pages(r)] * (r.n - 1))),
                reverse=True,
            )[: self.rows]
            needed = max(LEAST_PAGES, sum(longest[:: self.parts]) + max(longest, default=0))
            power = 1 << (needed - 1).bit_length()
            wanted = min(wanted, power // 4 * 3 if needed <= power // 4 * 3 else power)
        if self.calls.pool is not None and self.pages >= wanted:
            return False
        self.pages = max(self.pages, wanted)
        self.calls.make(self.pages)
        return True

    def keep(self, part: int, pages: Sequence[int]) -> Kept:
        """Copies the contents of pages of one part to the host."""
        return Kept(self.calls.keep(self._ids(part, pages, 0)), part)

    def restore(self, kept: Kept, part: int, pages: Sequence[int]) -> None:
        """Puts them into as many pages of any part; they are no longer kept."""
        self.calls.restore(
            kept.number, self._ids(part, pages, plans.NOWHERE), (part - kept.part) * SWAP_PAGES
        )

    def forget(self, kept: Kept) -> None:
        """Keeps them no longer."""
        self.calls.forget(kept.number)

    def move(self, part: int, moves: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Makes pages of one part of others of it, each ``(low, high, begin, cut, to)`` as
        ``device.Moves`` has them.
        """
        for i in range(0, max(1, len(moves)), SWAP_PAGES):  # a call at least, which compiles
            plan = np.zeros((5, self.parts * SWAP_PAGES), np.int32)
            plan[4] = plans.NOWHERE
            some = np.array(moves[i : i + SWAP_PAGES], np.int32).reshape(-1, 5).T
            plan[:, part * SWAP_PAGES : part * SWAP_PAGES + some.shape[1]] = some
            self.calls.move(device.Moves(*plan))  # type: ignore[arg-type]

    def routes(self, part: int, pages: Sequence[int], count: int) -> np.ndarray:
        """The experts of the first ``count`` tokens of pages, ``[count, L, X]``."""
        return self.calls.routes(
            self._ids(part, pages[: pages_for(count, PAGE)], 0), part * SWAP_PAGES, count
        )

    def nowhere(self) -> np.ndarray:
        """Numbers of pages for one call, all of pages that are not there."""
        return self._ids(0, [], plans.NOWHERE)[0]

    def _ids(self, part: int, pages: Sequence[int], none: int) -> list[np.ndarray]:
        """Numbers of pages for calls of SWAP_PAGES each, one at least, the other parts' beside
        them.
        """
        out = []
        for i in range(0, max(1, len(pages)), SWAP_PAGES):
            ids, some = np.full(self.parts * SWAP_PAGES, none, np.int32), pages[i : i + SWAP_PAGES]
            ids[part * SWAP_PAGES : part * SWAP_PAGES + len(some)] = some
            out.append(ids)
        return out

    def _count(self, nbytes: int | None) -> int:
        """Pages of each part that so many bytes hold."""
        mesh, cfg = self.base.mesh, self.base.cfg
        if nbytes is None:
            stats = (
                None
                if mesh.devices.flat[0].platform == "cpu"
                else jax.local_devices()[0].memory_stats()
            )
            nbytes = (
                int(CACHE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])) * mesh.size
                if stats
                else CACHE_BYTES
            )
        one = device.page_bytes(cfg, self.base.dtype, self.calls.keep_routes, device.lanes(mesh))
        count = nbytes // one // self.parts
        if count < 2:
            raise UserError(
                f"a cache of {nbytes:,} bytes has not two pages of {one:,} for each of {self.parts}"
                " parts: give more"
            )
        # No more than all rows can fill, and as much again for prompts that are kept.
        return min(count, 2 * -(-self.rows // self.parts) * (pages_for(cfg.context, PAGE) + 2))
