"""The cache's pages on the device: how many there are, and which go to the host and come back."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.pages import pages_for

CACHE_BYTES = 1 << 30  # on a CPU; on accelerators CACHE_SHARE of the memory that is free
CACHE_SHARE = 0.6
LEAST_PAGES = 16
SWAP_PAGES = 8  # pages of a part that go to or from the host in one call


class Cache:
    """The pool of one base.

    Args:
        rows: rows that decode together at most, over all parts.
        keep_routes: with the experts that tokens visit.
        nbytes: of all devices together, at most; None: see ``CACHE_BYTES``.

    Attributes:
        pool: the arrays; whoever calls a program that takes them puts its result here.
        pages: of each part.
        most: of each part, that there may be.

    Raises:
        UserError: ``nbytes`` are not two pages of each part.
    """

    def __init__(self, base: Base, rows: int, keep_routes: bool, nbytes: int | None):
        self.base, self.keep_routes, self.rows = base, keep_routes, rows
        self.parts = device.page_parts(base.cfg, base.mesh)
        self.pool: Any = None
        self.pages, self.most = 0, self._count(nbytes)

    def hold(self, sizes: Sequence[int] | None) -> bool:
        """Makes it as large as it may be, or large enough for samples of these sizes in pages; whether it was made anew, empty.

        One that is large enough stays, and the sizes are few, for each is a shape of the programs.
        """
        wanted = self.most
        if sizes is not None:
            longest = sorted(sizes, reverse=True)[: self.rows]
            needed = max(LEAST_PAGES, sum(longest[:: self.parts]) + max(longest, default=0))
            wanted = min(wanted, 1 << (needed - 1).bit_length())
        if self.pool is not None and self.pages >= wanted:
            return False
        self.pool, self.pages = None, max(self.pages, wanted)
        self.pool = device.empty_pool(self.base.cfg, self.base.mesh, self.pages, self.base.dtype, self.keep_routes)
        return True

    def drop(self) -> None:
        """Forgets everything."""
        self.pool = None

    def read(self, part: int, pages: Sequence[int], of: Any = None) -> list[Any]:
        """The contents of pages of one part, on the host, SWAP_PAGES at a time, the other parts' beside them.

        Args:
            of: what of the pool; None is all.
        """
        out = []
        for i in range(0, max(1, len(pages)), SWAP_PAGES):
            ids = self._ids(part, pages[i : i + SWAP_PAGES], 0)
            out.append(multihost.to_host(device.read_pages(self.pool if of is None else of, ids, cfg=self.base.cfg)))
        return out

    def write(self, part: int, pages: Sequence[int], contents: Sequence[Any], was: int) -> None:
        """Puts what ``read`` gave of part ``was`` into pages of another, or of the same."""
        for i, held in enumerate(contents):
            ids = self._ids(part, pages[i * SWAP_PAGES : (i + 1) * SWAP_PAGES], plans.NOWHERE)
            if part != was:
                held = jax.tree.map(lambda x: np.roll(x, (part - was) * SWAP_PAGES, axis=1), held)
            self.pool = device.write_pages(self.pool, ids, held, cfg=self.base.cfg)

    def _ids(self, part: int, pages: Sequence[int], none: int) -> np.ndarray:
        ids = np.full(self.parts * SWAP_PAGES, none, np.int32)
        ids[part * SWAP_PAGES : part * SWAP_PAGES + len(pages)] = pages
        return ids

    def routes(self, part: int, pages: Sequence[int], count: int) -> np.ndarray:
        """The experts of the first ``count`` tokens of pages, ``[count, L, X]``."""
        at = part * SWAP_PAGES
        read = self.read(part, pages[: pages_for(count, PAGE)], {"routes": self.pool["moe"]["routes"]})
        whole = np.concatenate([held["routes"][:, at : at + SWAP_PAGES] for held in read], axis=1)  # [L, n, PAGE, X]
        return whole.reshape(whole.shape[0], -1, whole.shape[-1])[:, :count].swapaxes(0, 1)

    def _count(self, nbytes: int | None) -> int:
        """Pages of each part that so many bytes hold."""
        mesh, cfg = self.base.mesh, self.base.cfg
        if nbytes is None:
            stats = None if mesh.devices.flat[0].platform == "cpu" else jax.local_devices()[0].memory_stats()
            nbytes = int(CACHE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])) * mesh.size if stats else CACHE_BYTES
        one = device.page_bytes(cfg, self.base.dtype, self.keep_routes, device.lanes(mesh))
        count = nbytes // one // self.parts
        if count < 2:
            raise UserError(f"a cache of {nbytes:,} bytes has not two pages of {one:,} for each of {self.parts} parts: give more")
        # No more than all rows can fill, and as much again for prompts that are kept.
        return min(count, 2 * -(-self.rows // self.parts) * (pages_for(cfg.context, PAGE) + 2))
