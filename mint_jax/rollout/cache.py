"""The paged KV cache on the device: its size, and swapping its pages to the host."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.calls import DeviceCalls
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import own_pages, pages_needed

CACHE_BYTES = 1 << 30  # on CPUs; accelerators use CACHE_SHARE of their free memory
CACHE_SHARE = 0.6
LEAST_PAGES = 16
SWAP_PAGES = 8  # pages of each part in one swap call


class SwappedPages(NamedTuple):
    """Handle of page contents on the host: their key in ``DeviceCalls``, and the mesh part that
    they were read from.
    """

    number: int
    part: int


class PagedCache:
    """The KV cache of one base.

    Args:
        rows: maximum number of rows that decode together, over all parts.
        nbytes: maximum bytes over all devices; None uses ``CACHE_BYTES`` or ``CACHE_SHARE``.

    Attributes:
        pages, most: allocated and maximum pages of each part.

    Raises:
        UserError: ``nbytes`` hold fewer than two pages of each part.
    """

    def __init__(self, base: Base, rows: int, calls: DeviceCalls, nbytes: int | None):
        self.base, self.calls, self.rows = base, calls, rows
        self.parts, self._numbers = device.page_parts(base.cfg, base.mesh), itertools.count()
        self.pages = 0
        self.most = multihost.agree("pages of the cache", lambda: self._count(nbytes))

    def ensure_capacity(self, requests: Sequence[Request] | None) -> bool:
        """Grows the cache to its maximum, or to hold as many samples of ``requests`` as there are
        rows. Returns True if it was reallocated and is now empty.
        """
        wanted = self.most
        if requests is not None:
            # Samples of a request share the prompt's pages, so the prompt counts once and each
            # further sample adds its own pages. Counting prompts per sample gave 32 samples of 8
            # prompts of SmolLM2 189 MB instead of 94.
            sizes = [n for r in requests for n in (pages_needed(r), *[own_pages(r)] * (r.n - 1))]
            longest = sorted(sizes, reverse=True)[: self.rows]
            needed = max(LEAST_PAGES, sum(longest[:: self.parts]) + max(longest, default=0))
            # Few sizes, because each is one more shape to compile.
            power = 1 << (needed - 1).bit_length()
            wanted = min(wanted, power // 4 * 3 if needed <= power // 4 * 3 else power)
        if self.calls.pool is not None and self.pages >= wanted:
            return False
        self.pages = max(self.pages, wanted)
        self.calls.make(self.pages)
        return True

    def swap_out(self, part: int, pages: Sequence[int]) -> SwappedPages:
        swapped = SwappedPages(next(self._numbers), part)
        self.calls.swap_out(swapped.number, self._ids(part, pages, 0))
        return swapped

    def swap_in(self, swapped: SwappedPages, part: int, pages: Sequence[int]) -> None:
        """Writes the contents into as many pages of any part, and drops the host copy."""
        ids, shift = self._ids(part, pages, plans.NOWHERE), (part - swapped.part) * SWAP_PAGES
        self.calls.swap_in(swapped.number, ids, shift)

    def discard(self, swapped: SwappedPages) -> None:
        self.calls.discard(swapped.number)

    def move(self, part: int, moves: Sequence[tuple[int, int, int, int, int]]) -> None:
        """Builds pages of one part from two others each; a move is ``(low, high, begin, cut, to)``
        as in ``device.PageMoves``.
        """
        for i in range(0, max(1, len(moves)), SWAP_PAGES):  # at least one call, to compile it
            plan = np.zeros((5, self.parts * SWAP_PAGES), np.int32)
            plan[4] = plans.NOWHERE
            some = np.array(moves[i : i + SWAP_PAGES], np.int32).reshape(-1, 5).T
            plan[:, part * SWAP_PAGES : part * SWAP_PAGES + some.shape[1]] = some
            self.calls.move(device.PageMoves(*plan))

    def routes(self, part: int, pages: Sequence[int], count: int) -> np.ndarray:
        """Returns the expert ids of the first ``count`` tokens in pages, ``[count, L, X]``."""
        ids = self._ids(part, pages[: pages_for(count, PAGE)], 0)
        return self.calls.routes(next(self._numbers), ids, part * SWAP_PAGES, count)

    def nowhere(self) -> np.ndarray:
        """Returns page numbers for one call, all out of range."""
        return self._ids(0, [], plans.NOWHERE)[0]

    def _ids(self, part: int, pages: Sequence[int], none: int) -> list[np.ndarray]:
        """Splits page numbers into calls of SWAP_PAGES, at least one. Each array also spans the
        other parts, whose entries are ``none``.
        """
        out = []
        for i in range(0, max(1, len(pages)), SWAP_PAGES):
            ids, some = np.full(self.parts * SWAP_PAGES, none, np.int32), pages[i : i + SWAP_PAGES]
            ids[part * SWAP_PAGES : part * SWAP_PAGES + len(some)] = some
            out.append(ids)
        return out

    def _count(self, nbytes: int | None) -> int:
        """Returns the pages of each part that fit in ``nbytes``."""
        mesh, cfg = self.base.mesh, self.base.cfg
        if nbytes is None:
            nbytes, is_on_cpu = CACHE_BYTES, mesh.devices.flat[0].platform == "cpu"
            if not is_on_cpu and (stats := jax.local_devices()[0].memory_stats()):
                free = stats["bytes_limit"] - stats["bytes_in_use"]
                nbytes = int(CACHE_SHARE * free) * mesh.size
        one = device.page_bytes(cfg, self.base.dtype, self.calls.keep_routes, device.lanes(mesh))
        count = nbytes // one // self.parts
        if count < 2:
            raise UserError(
                f"a cache of {nbytes:,} bytes cannot hold two pages of {one:,} bytes in each of"
                f" {self.parts} parts: raise cache_gib"
            )
        # Enough for all rows at full context, and as much again for cached prompts.
        return min(count, 2 * -(-self.rows // self.parts) * (pages_for(cfg.context, PAGE) + 2))
