"""Invariants of the pages and of the scheduler; the pieces of a stream."""

import queue
from collections import Counter

from mint_jax.models.paged import PAGE


def pieces(stream):
    """Iterator over a stream's pieces as they come."""
    received = queue.SimpleQueue()
    stream.listen(received.put)
    return iter(received.get, None)


def is_idle(schedule) -> bool:
    return not (schedule.waiting or schedule.swapped or schedule.running)


def check_schedule(schedule) -> None:
    """No page is lost or owned twice, and rows, users and states agree."""
    for part, pool in enumerate(schedule.pages):
        running = [s for s in schedule.running if s.prompt.part == part]
        prompts = Counter(s.prompt for s in running)
        assert len(running) <= schedule.rows
        assert all(p.users == n for p, n in prompts.items())
        ahead = [prompt for prompt in schedule.ahead if prompt.part == part]
        users = Counter(b for prompt in (*prompts, *ahead) for b in prompt.blocks)
        unindexed = [b.page for b in users if not b.indexed or b.root.closed]
        _check_pages(pool, [page for s in running for page in s.pages] + unindexed, users)
        if schedule.window is not None:
            _check_near(schedule, pool.near, running, [*prompts, *ahead])
    assert not any(s.pages or s.finish for s in (*schedule.waiting, *schedule.swapped))
    assert not any(prompt.users for prompt in schedule.ahead)
    assert {*schedule.ahead} <= {s.prompt for s in schedule.waiting}


def _check_near(schedule, near, running, prompts) -> None:
    """Every near page is free, a sample's or a block's, exactly once; pinned blocks are pinned by
    prompts, which have those that the next token reaches.
    """
    own = [page for s in running for page in s.near.values()]
    assert sorted([*near._free, *near.of.values(), *own]) == list(range(near.count))
    pins = Counter(p.blocks[i] for p in prompts for i in p.near)
    assert pins == near._pins
    assert {*pins} | {*near._idle} == {*near.of}
    for prompt in prompts:
        assert all(near.of[prompt.blocks[i]] == page for i, page in prompt.near.items())
        position = min(prompt.written * PAGE, prompt.length)
        assert {*prompt.near} >= {*range(reach(schedule, position), prompt.written)}
    for s in running:
        assert {*s.near} >= {*range(reach(schedule, s.own), len(s.pages))}


def reach(schedule, position) -> int:
    """The first page with a position that the token at ``position`` attends to."""
    last, begin = position // PAGE, position - schedule.window
    return next((i for i in range(last) if (i + 1) * PAGE - 1 > begin), last)


def _check_pages(pool, in_use, users) -> None:
    """Every page is free, in ``in_use`` or in a block, exactly once; idle blocks can be dropped in
    their order.
    """
    blocks, stack = [], list(pool._roots.values())
    while stack:
        children = stack.pop().children.values()
        blocks.extend(children)
        stack.extend(children)
    pages = sorted([*pool._free, *in_use, *(block.page for block in blocks)])
    assert pages == list(range(pool.count)), "pages are lost or owned twice"
    turn = {block: i for i, block in enumerate(pool._idle)}
    assert set(turn) == {block for block in blocks if block.users == 0}
    for block, i in turn.items():
        assert block.ready
        assert all(turn.get(child, len(turn)) <= i for child in block.children.values())
    assert all(b.ready or not child.ready for b in blocks for child in b.children.values())
    assert all(root.children and not root.closed for root in pool._roots.values())
    assert all(block.users == users.get(block, 0) for block in {*blocks, *users})
