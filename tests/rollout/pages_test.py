"""Pages of the cache, as properties: random operations against a model that remembers what was
written where.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.errors import UserError
from mint_jax.rollout.pages import PagePool, pages_for, require_fit
from tests.rollout.invariants import check_pages

SIZE = 2  # tokens of a page
TENANTS, VERSIONS = ("a", "b"), (None, 1)
KEYS = [(tenant, version) for tenant in TENANTS for version in VERSIONS]
NUMBERS = st.integers(0, 1000)
KINDS = ("open", "open", "open", "write", "write", "extend", "close", "take", "give", "forget")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), NUMBERS, NUMBERS), min_size=120, max_size=200)
# most begin alike
PROMPTS = [
    tuple(n >> i & 1 for i in range(length)) for length in range(8) for n in range(1 << length)
]


class World:
    """Pages, and the contents that a device would have in them.

    Attributes:
        contents: page -> the chain that was written there last, or whose it is since.
        born: how often each key was forgotten.
        prompts: (key and age, tokens, blocks) that are open.
        taken: pages that ``take`` gave.
    """

    def __init__(self, count: int):
        self.pages = PagePool(count, SIZE)
        self.contents: dict[int, object] = {}
        self.born: Counter = Counter()
        self.prompts: list = []
        self.taken: list[list[int]] = []

    def chain(self, prompt, i: int) -> object:
        key, tokens, _ = prompt
        return key, tokens[: (i + 1) * SIZE]

    def open(self, key, tokens, spare: int) -> None:
        held = {page for _, _, blocks in self.prompts for page in (b.page for b in blocks)} | {
            p for ps in self.taken for p in ps
        }
        before = self.pages.available, self.pages.cached
        opened = self.pages.open(key, tokens, spare)
        if opened is None:
            assert (self.pages.available, self.pages.cached) == before, "nothing changed"
            assert pages_for(len(tokens), SIZE) + spare > before[0] - before[1], "there was room"
            return
        blocks, found = opened
        prompt = (key, self.born[key]), tokens, blocks
        assert [t for b in blocks for t in b.tokens] == list(tokens)
        assert len({b.page for b in blocks}) == len(blocks) == pages_for(len(tokens), SIZE)
        assert self.pages.available >= spare
        for i, block in enumerate(blocks):
            if i >= found:
                assert block.page not in held, "a page that is somebody's was given"
                assert not block.ready
                self.contents[block.page] = "nothing yet"
            elif block.ready:
                assert self.contents[block.page] == self.chain(prompt, i), (
                    "a hit is of the same tenant, version and tokens"
                )
            else:
                assert any(block in blocks for _, _, blocks in self.prompts), (
                    "a block that is not written is somebody's"
                )
        self.prompts.append(prompt)

    def write(self, prompt) -> None:
        """The next block that is not written, as prefill would do it."""
        for i, block in enumerate(prompt[2]):
            if not block.ready:
                block.ready = True
                self.contents[block.page] = self.chain(prompt, i)
                return

    def extend(self, prompt, more) -> None:
        """What was decoded behind a prompt that is written becomes blocks that others find."""
        key, tokens, blocks = prompt
        if key[1] != self.born[key[0]] or not all(block.ready for block in blocks):
            return
        held = {page for _, _, blocks in self.prompts for page in (b.page for b in blocks)} | {
            p for ps in self.taken for p in ps
        }
        whole, begin = (*tokens, *more), len(tokens) // SIZE
        found, new = self.pages.extend(key[0], whole, begin)
        assert [t for b in found for t in b.tokens] == list(whole[: len(found) * SIZE])
        for i, block in enumerate(found):
            if (i, block) in new:
                assert i >= begin
                assert block.page not in held, "a page that is somebody's was given"
                assert not block.ready
                self.contents[block.page] = self.chain((key, whole, found), i)
                block.ready = True
            else:
                assert self.contents[block.page] == self.chain((key, whole, found), i), (
                    "what is there is of the same tokens"
                )
        self.pages.close(found)

    def close(self, prompt) -> None:
        for i, block in enumerate(prompt[2]):
            assert not block.ready or self.contents[block.page] == self.chain(prompt, i), (
                "what is held stays as it was"
            )
        self.pages.close(prompt[2])
        self.prompts.remove(prompt)

    def take(self, n: int) -> None:
        possible, cached = self.pages.available, self.pages.cached
        pages = self.pages.take(n)
        assert (pages is None) == (n > possible)
        if pages is not None:
            assert self.pages.cached == min(cached, possible - n), (
                "no block is dropped while a page is free"
            )
            self.contents |= dict.fromkeys(pages, "raw")
            self.taken.append(pages)

    def forget(self, key) -> None:
        self.pages.forget(key)
        self.born[key] += 1

    def check(self) -> None:
        users = Counter(block for _, _, blocks in self.prompts for block in blocks)
        unseen = [b.page for b in users if not b.indexed or b.root.closed]
        check_pages(self.pages, [page for pages in self.taken for page in pages] + unseen, users)
        for page in (page for pages in self.taken for page in pages):
            assert self.contents[page] == "raw"

    def end(self) -> None:
        for prompt in list(self.prompts):
            self.close(prompt)
        for pages in self.taken:
            self.pages.give(pages)
        self.taken = []
        self.check()
        assert self.pages.take(self.pages.count) is not None, "nothing has leaked"
        assert self.pages.available == self.pages.cached == 0
        check_pages(self.pages, range(self.pages.count), {})


def run(count: int, steps) -> int:
    world = World(count)
    for kind, x, y in steps:
        if kind == "open":
            world.open(KEYS[x % len(KEYS)], PROMPTS[y % len(PROMPTS)], x // len(KEYS) % 3)
        elif kind == "write" and world.prompts:
            world.write(world.prompts[x % len(world.prompts)])
        elif kind == "extend" and world.prompts:
            world.extend(world.prompts[x % len(world.prompts)], PROMPTS[y % len(PROMPTS)])
        elif kind == "close" and world.prompts:
            world.close(world.prompts[x % len(world.prompts)])
        elif kind == "take":
            world.take(x % 4)
        elif kind == "give" and world.taken:
            world.pages.give(world.taken.pop(x % len(world.taken)))
        elif kind == "forget":
            world.forget(KEYS[x % len(KEYS)])
        world.check()
    world.end()
    return len(steps)


def test_any_operations_leave_every_page_once_and_hits_are_of_the_same_tenant_version_and_tokens():
    done = []

    @settings(max_examples=100)
    @given(st.integers(1, 14), STEPS)
    def any_operations(count, steps):
        done.append(run(count, steps))

    any_operations()
    assert sum(done) >= 10_000


def opened(pages: PagePool, tokens, key=("a", None), ready: bool = True) -> tuple[list, int]:
    got = pages.open(key, tokens)
    assert got is not None
    for block in got[0]:
        block.ready = block.ready or ready
    return got


def test_whole_blocks_are_found_again_and_a_last_one_that_is_not_whole_never_is():
    pages = PagePool(8, SIZE)
    blocks, found = opened(pages, (1, 2, 3, 4, 5))
    assert (len(blocks), found) == (3, 0)
    again, found = opened(pages, (1, 2, 3, 4, 5))
    assert found == 2
    assert again[:2] == blocks[:2]
    assert again[2].page != blocks[2].page
    assert opened(pages, (3, 4))[1] == 0, "the same tokens behind others"
    assert opened(pages, ()) == ([], 0)


def test_the_least_recently_used_block_goes_first_and_a_parent_after_its_children():
    pages = PagePool(4, SIZE)
    old, new = opened(pages, (1, 1, 2, 2))[0], opened(pages, (3, 3, 4, 4))[0]
    pages.close(new)
    pages.close(old)
    pages.close(opened(pages, (3, 3))[0])  # used again, without its child
    kept = []
    while pages.take(1):
        check_pages(pages, [p for p in range(4) if p not in {b.page for b in pages._idle}])
        kept.append([b.tokens for b in pages._idle])
    assert kept == [[(2, 2), (1, 1), (3, 3)], [(1, 1), (3, 3)], [(3, 3)], []]


def test_as_many_versions_as_come_leave_nothing_behind():
    pages = PagePool(2, SIZE)
    for version in range(1000):
        pages.close(opened(pages, (version,) * 4, ("a", version))[0])
        pages.close(opened(pages, (version,), ("b", version))[0])
    assert len(pages._roots) <= 2


def test_giving_or_closing_twice_is_an_error():
    pages = PagePool(2, SIZE)
    got = pages.take(1)
    assert got is not None
    pages.give(got)
    with pytest.raises(RuntimeError, match="freed twice"):
        pages.give(got)
    pages = PagePool(2, SIZE)
    blocks, _ = opened(pages, (1, 2))
    pages.close(blocks)
    with pytest.raises(RuntimeError, match="closed twice"):
        pages.close(blocks)


def test_pages_are_rounded_up_and_what_does_not_fit_is_refused():
    assert [pages_for(n, 32) for n in (0, 1, 32, 33, 64)] == [0, 1, 1, 2, 2]
    require_fit(4, 4, "it")
    with pytest.raises(UserError, match="it needs 5 pages, the cache has 4"):
        require_fit(5, 4, "it")
