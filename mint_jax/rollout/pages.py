"""Which pages of one part of the cache are free, which hold what, and which prompts' blocks can be
used again. No arrays.

A *block* is one page of a prompt: PAGE tokens behind those of its parent, under one tenant and one
version of the weights. Whole blocks are indexed by that chain, and the tokens themselves are
compared, never a hash alone (law 7): a prompt that begins as another did takes its pages as they
are. Prefill writes a block alike whatever is beside it, so that a hit changes no bit; blocks of
what decoding wrote (``extend``) differ in the last bits from what prefill would write, and are
there only where that was asked for. A block that nobody uses stays until its page is wanted, the
least recently used one first, and never before its children.
"""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

from mint_jax.errors import UserError


class Root:
    """The empty prompt of one tenant and version: where chains begin. ``closed``: its blocks are
    not to be used again.
    """

    def __init__(self, key: Hashable) -> None:
        self.key, self.closed = key, False
        self.children: dict[tuple[int, ...], Block] = {}


class Block:
    """A page of a prompt.

    Attributes:
        parent: the block, or the root, that it follows.
        tokens: what it holds; fewer than a page only as the last of a prompt, which is not indexed.
        users: how many prompts hold it.
        ready: whether it is written, or a call that writes it is under way.
        indexed: whether other prompts can find it.
    """

    __slots__ = ("children", "indexed", "page", "parent", "ready", "root", "tokens", "users")

    def __init__(
        self, parent: "Block | Root", root: Root, tokens: tuple[int, ...], page: int, indexed: bool
    ):
        self.parent, self.root, self.tokens, self.page, self.indexed = (
            parent,
            root,
            tokens,
            page,
            indexed,
        )
        self.users, self.ready = 1, False
        self.children: dict[tuple[int, ...], Block] = {}


class Pages:
    """The pages of one part.

    Args:
        count: pages.
        size: tokens of a page.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self._roots: dict[Hashable, Root] = {}  # those that have blocks
        # nobody's, the least recently used first
        self._idle: OrderedDict[Block, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that ``take`` could give."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that are still there."""
        return len(self._idle)

    def take(self, n: int) -> list[int] | None:
        """``n`` pages, or None where there are not as many."""
        if n > self.available:
            return None
        while len(self._free) < n:
            self._drop(self._idle.popitem(last=False)[0])
        return [self._free.pop() for _ in range(n)]

    def give(self, pages: Sequence[int]) -> None:
        """Takes back what ``take`` gave."""
        self._free.extend(pages)
        if len(self._free) > self.count:
            raise RuntimeError("a page was given back twice")

    def open(
        self, key: Hashable, tokens: Sequence[int], spare: int = 0, shared: int | None = None
    ) -> tuple[list[Block], int] | None:
        """The blocks of a prompt: those that are there, and new ones for the rest.

        Args:
            key: tenant and version.
            spare: pages that must be available afterwards.
            shared: how many blocks may be found, now and by others; None: all.

        Returns:
            The blocks, in order, and how many of them were there; None, and nothing changed, where
            there are too few pages.
        """
        root = self._roots.get(key) or Root(key)
        pieces = [tuple(tokens[i : i + self.size]) for i in range(0, len(tokens), self.size)]
        found: list[Block] = []
        at: Block | Root = root
        for piece in pieces[:shared]:
            block = at.children.get(piece)
            if block is None:
                break
            found.append(block)
            at = block
        for block in found:  # before pages are taken, which may drop idle ones
            block.users += 1
            self._idle.pop(block, None)
        fresh = pieces[len(found) :]
        if len(fresh) + spare > self.available or (pages := self.take(len(fresh))) is None:
            self.close(found)
            return None
        blocks = list(found)
        for i, (piece, page) in enumerate(zip(fresh, pages), len(found)):
            findable = len(piece) == self.size and (shared is None or i < shared)
            block = Block(at, root, piece, page, findable)
            if findable:
                at.children[piece] = block
                self._roots[key] = root
            blocks.append(block)
            at = block
        return blocks, len(found)

    def extend(
        self, key: Hashable, tokens: Sequence[int], begin: int
    ) -> tuple[list[Block], list[tuple[int, Block]]]:
        """Blocks of tokens that are cached elsewhere, behind a prompt's: as many as there are pages
        for.

        Args:
            tokens: of a prompt that is open, and behind it; a last piece that is no whole page is
                left out.
            begin: how many whole blocks the prompt has; nothing is done where others could not find
                them.

        Returns:
            Blocks that are held, to be closed; and of these the new ones with their numbers, which
            are to be written and made ready.
        """
        root = self._roots.get(key) or Root(key)
        held: list[Block] = []
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
            else:  # of a prompt that is being read
                break
            held.append(block)
            at = block
        return held, new

    def close(self, blocks: Sequence[Block]) -> None:
        """Ends a prompt's use of its blocks."""
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
        """Blocks of a version that is no more: nobody finds them from now on."""
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
        self.give([block.page])

    def check(self, held: Sequence[int], users: Mapping[Block, int] | None = None) -> None:
        """Whether every page is free, held by ``held``, or in a block, once, and whether idle
        blocks may be dropped in their order.

        Args:
            held: what ``take`` gave, and the pages of blocks that no prompt can find.
            users: how many prompts hold each block; None is not compared.

        Raises:
            RuntimeError: naming the pages that are not.
        """
        blocks: list[Block] = []
        stack: list[Block | Root] = list(self._roots.values())
        while stack:
            children = stack.pop().children.values()
            blocks.extend(children)
            stack.extend(children)
        pages = sorted([*self._free, *held, *(block.page for block in blocks)])
        if pages != list(range(self.count)):
            wrong = sorted(set(range(self.count)) ^ set(pages)) or [
                p for p, q in itertools.pairwise(pages) if p == q
            ]
            raise RuntimeError(f"pages {wrong} are lost or held twice")
        turn = {block: i for i, block in enumerate(self._idle)}
        if set(turn) != {block for block in blocks if block.users == 0}:
            raise RuntimeError("idle blocks are not those without users")
        if any(
            not block.ready
            or any(turn.get(child, len(turn)) > i for child in block.children.values())
            for block, i in turn.items()
        ):
            raise RuntimeError(
                "an idle block is not written, or would be dropped before its children"
            )
        if any(
            child.ready and not block.ready for block in blocks for child in block.children.values()
        ):
            raise RuntimeError("a block is written and its parent is not")
        if any(not root.children or root.closed for root in self._roots.values()):
            raise RuntimeError("an empty chain is kept")
        if users is not None and any(
            block.users != users.get(block, 0) for block in {*blocks, *users}
        ):
            raise RuntimeError("a block's users are not those who hold it")


def pages_for(tokens: int, size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // size)


def require_fit(needed: int, count: int, what: str) -> None:
    """Refuses a request that no cache of this size can hold.

    Raises:
        UserError: naming both.
    """
    if needed > count:
        remedy = "give more cache (--config.cache_gib), or ask for fewer tokens"
        raise UserError(f"{what} needs {needed} pages of cache, there are {count}: {remedy}")
