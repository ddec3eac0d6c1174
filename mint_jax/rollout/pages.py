"""Free pages, used pages and the prefix cache of one part of the KV cache. Plain Python, no arrays.

A *block* is one page of a prompt: PAGE tokens that follow those of its parent, for one tenant and
one version of the weights. Full blocks are indexed by that chain; tokens are compared, never only a
hash (law 7). Prefill writes a block the same in any batch, so a hit changes no bit. An unused block
stays until its page is needed: least recently used first, children before parents.

Layers with a window have pages of their own, *near* pages. A block keeps its near page after the
prompts that read it have moved on, until another block needs it: least recently used first.
"""

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class Root:
    """Begin of the chains of one tenant and version; blocks of a ``closed`` root are not reused."""

    def __init__(self, key: Hashable) -> None:
        self.key, self.closed = key, False
        self.children: dict[tuple[int, ...], Block] = {}


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """A page of a prompt, for ``users`` prompts. Only the last block of a prompt may have fewer
    tokens than a page; other prompts can find those that are ``indexed``. ``ready``: it is written,
    or a call that writes it is enqueued. ``parent`` is the previous block, or the root. ``state``:
    slot with a snapshot of the layers' states after it, which ``pins`` prompts read.
    """

    parent: "Block | Root"
    root: Root
    tokens: tuple[int, ...]
    page: int
    indexed: bool
    users: int = 1
    ready: bool = False
    state: int | None = None
    pins: int = 0
    children: "dict[tuple[int, ...], Block]" = dataclasses.field(default_factory=dict)


class NearPages:
    """The ``count`` near pages of one part.

    Attributes:
        of: the near page of each block that has one.
    """

    def __init__(self, count: int):
        self.count = count
        self.of: dict[Block, int] = {}
        self._free = list(range(count - 1, -1, -1))
        self._pins = Counter[Block]()
        # Blocks that have a page and no pin, least recently used first.
        self._idle: OrderedDict[Block, None] = OrderedDict()

    def take(self) -> int | None:
        """Returns a page, which may be that of an idle block."""
        if not self._free and self._idle:
            self.drop(next(iter(self._idle)))
        return self._free.pop() if self._free else None

    def give(self, pages: Iterable[int]) -> None:
        """Returns pages of ``take`` to the free list."""
        self._free.extend(pages)

    def pin(self, block: Block) -> bool:
        """Keeps a block's page until ``unpin``; returns False if it has none and none is left."""
        if block not in self.of:
            if (page := self.take()) is None:
                return False
            self.of[block] = page
        self._pins[block] += 1
        self._idle.pop(block, None)
        return True

    def unpin(self, block: Block) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            self._idle[block] = None

    def drop(self, block: Block) -> None:
        """Takes the page of a block without pins, if it has one."""
        if block in self.of:
            del self._idle[block]
            self._free.append(self.of.pop(block))


class PagePool:
    """The ``count`` pages of one part, of ``size`` tokens each, its ``near`` pages, and its slots
    of ``states``.
    """

    def __init__(self, count: int, size: int, states: int = 0, near: int = 0):
        self.count, self.size, self.near = count, size, NearPages(near)
        self._free = list(range(count - 1, -1, -1))
        self._roots: dict[Hashable, Root] = {}  # roots that have blocks
        # Blocks without users, least recently used first.
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._states = list(range(states))
        # Blocks with a snapshot, least recently used first.
        self._snapshots: OrderedDict[Block, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of pages that ``take`` can return."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        return len(self._idle)

    def take(self, n: int) -> list[int] | None:
        if n > self.available:
            return None
        while len(self._free) < n:
            self._drop(self._idle.popitem(last=False)[0])
        return [self._free.pop() for _ in range(n)]

    def take_state(self) -> int | None:
        """Returns a slot for a state, which may be that of the oldest snapshot."""
        if not self._states:
            unread = (block for block in self._snapshots if not block.pins)
            if (block := next(unread, None)) is None:
                return None
            self._drop_snapshot(block)
        return self._states.pop()

    def give_state(self, slot: int) -> None:
        self._states.append(slot)

    def snapshot(self, block: Block) -> int | None:
        """Returns a slot for a snapshot after a block that is being written, if one is free."""
        if block.indexed and block.state is None and (slot := self.take_state()) is not None:
            block.state = slot
            self._snapshots[block] = None
        return block.state

    def _drop_snapshot(self, block: Block) -> None:
        del self._snapshots[block]
        assert block.state is not None
        self.give_state(block.state)
        block.state = None

    def known(self, blocks: Sequence[Block]) -> int:
        """Returns the number of leading blocks up to the last with a snapshot."""
        found = [i for i, block in enumerate(blocks, 1) if block.ready and block.state is not None]
        if found:
            self._snapshots.move_to_end(blocks[found[-1] - 1])
        return found[-1] if found else 0

    def give(self, pages: Sequence[int]) -> None:
        """Returns pages of ``take`` to the free list."""
        self._free.extend(pages)
        if len(self._free) > self.count:
            raise RuntimeError("a page was freed twice")

    def open(
        self, key: Hashable, tokens: Sequence[int], spare: int = 0, shared: int | None = None
    ) -> tuple[list[Block], int] | None:
        """Finds the cached blocks of a prompt and takes pages for the others. Returns the blocks in
        order, and how many of them were cached; None, with nothing changed, unless ``spare`` pages
        remain.

        Args:
            key: tenant and version.
            shared: number of blocks that may be shared with other prompts; None: all.
        """
        root = self._roots.get(key) or Root(key)
        pieces = [tuple(tokens[i : i + self.size]) for i in range(0, len(tokens), self.size)]
        blocks: list[Block] = []
        at: Block | Root = root
        for piece in pieces[:shared]:
            if (block := at.children.get(piece)) is None:
                break
            blocks.append(block)
            at = block
        for block in blocks:  # before ``take``, which may drop idle blocks
            block.users += 1
            self._idle.pop(block, None)
        found = len(blocks)
        fresh = pieces[found:]
        if len(fresh) + spare > self.available or (pages := self.take(len(fresh))) is None:
            self.close(blocks)
            return None
        for i, (piece, page) in enumerate(zip(fresh, pages), found):
            findable = len(piece) == self.size and (shared is None or i < shared)
            block = Block(at, root, piece, page, findable)
            if findable:
                at.children[piece] = block
                self._roots[key] = root
            blocks.append(block)
            at = block
        return blocks, found

    def extend(
        self, key: Hashable, tokens: Sequence[int], begin: int
    ) -> tuple[list[Block], list[tuple[int, Block]]]:
        """Adds whole blocks for tokens that were decoded into other pages, while there are free
        pages. Returns the held blocks, for ``close``, and the new ones with their numbers, which
        the caller writes and marks ready.

        Args:
            begin: number of full blocks of the prompt; if these are not indexed, nothing is added.
        """
        root = self._roots.get(key) or Root(key)
        taken: list[Block] = []
        new: list[tuple[int, Block]] = []
        at: Block | Root = root
        for i in range(len(tokens) // self.size):
            piece = tuple(tokens[i * self.size : (i + 1) * self.size])
            block = at.children.get(piece)
            if block is None:
                if i < begin or (pages := self.take(1)) is None:
                    break
                block = at.children[piece] = Block(at, root, piece, pages[0], True)
                self._roots[key] = root
                new.append((i, block))
            elif block.ready:
                block.users += 1
                self._idle.pop(block, None)
            else:  # another prompt is still being prefilled
                break
            taken.append(block)
            at = block
        return taken, new

    def close(self, blocks: Sequence[Block]) -> None:
        """Releases a prompt's blocks."""
        for block in reversed(blocks):  # children first: they are then the less recently used
            block.users -= 1
            if block.users < 0:
                raise RuntimeError("a block was closed twice")
            if block.users == 0:
                if block.indexed and block.ready and not block.root.closed:
                    self._idle[block] = None
                else:
                    self._drop(block)

    def forget(self, key: Hashable) -> None:
        """Removes a version's blocks from the index."""
        root = self._roots.pop(key, None)
        if root is None:
            return
        root.closed = True
        for block in [block for block in self._idle if block.root is root]:
            del self._idle[block]
            self._drop(block)

    def _drop(self, block: Block) -> None:
        if block.children:
            raise RuntimeError("a block was dropped before its children")
        if block.indexed and block.parent.children.get(block.tokens) is block:
            del block.parent.children[block.tokens]
            if block.parent is block.root and not block.root.closed and not block.root.children:
                del self._roots[block.root.key]
        if block.state is not None:
            self._drop_snapshot(block)
        self.near.drop(block)
        self.give([block.page])


def pages_for(tokens: int, size: int) -> int:
    """Returns the number of pages that hold ``tokens`` tokens."""
    return -(-tokens // size)
