"""One request and seed give one answer, bit for bit, in any company: other rows and their adapters,
their order, the size of the cache, the steps of a dispatch, hits of the prompts' cache, neighbours
that end early or are NaN.

Bases are tiny and of every family, the engines' caches so small that samples are preempted, tokens
and adapters random.
"""

import dataclasses
import json
import os
import zlib
from collections import Counter

import jax
import numpy as np
import pytest

from mint_jax.compiling import compilations
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import base as base_lib
from mint_jax.models import transformer
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from tests.adapters import biased_targets, random_adapter
from tests.laws.shardings_equal_test import save_checkpoint
from tests.rollout.invariants import check_schedule, is_idle, pieces

pytestmark = pytest.mark.bits

# Latent attention is compiled as for users: without LLVM's optimisations a delta of one slot's rows
# and one of several slots' differ in the last bit now and then.
MARKS = {
    "llama": (),
    # states as in qwen3_5, keys as in gemma4_shared, routes as in qwen3_moe
    "qwen3_next gemma4_moe": (pytest.mark.slow,),
    "qwen3_5 qwen3_moe gpt_oss nemotron_h gemma4_shared kimi_linear": (pytest.mark.long,),
    "deepseek_v3 deepseek_v32 glm": (pytest.mark.long, pytest.mark.users),
}
FAMILIES = [pytest.param(f, marks=marks) for names, marks in MARKS.items() for f in names.split()]
VOCAB = 96  # of the smallest base
# of a prompt, the rest of it shared
LAST = {"prompt_logprobs": True, "prompt_alternatives": 2, "prompt_logprobs_last_n": 12}
BOTH = 2 * PAGE  # tokens with which several prompts begin
# pages of a cache: in the first samples are preempted; one request needs 6 at most
SMALL, LARGE = 13, 16
LINEAR = (lora_tree.ALL_LINEAR,)
CONFIGS = {
    "one": AdapterConfig(1, 2.0, LINEAR),
    "eight": AdapterConfig(8, 16.0, LINEAR),
    "more": AdapterConfig(5, 5.0, (*LINEAR, "embed", "unembed")),
    "nan": AdapterConfig(8, 8.0, LINEAR),
    "nan_one": AdapterConfig(1, 1.0, LINEAR),
    "bias": AdapterConfig(kind="bias"),  # of all targets that take one
    "nan_bias": AdapterConfig(kind="bias"),
    "basis": AdapterConfig(5, 5.0, LINEAR, kind="basis"),
}
# of a base with experts, where they are neighbours of the other form
SHARED = ("more", "nan_one")
SOUND = (None, "one", "eight", "more", "bias", "basis")
NAN = ("nan", "nan_one", "nan_bias")


def random_stacks(rng, cfg):
    """Stacks of the buckets 0, 1 and 8, and the slot of each name."""
    specs = transformer.abstract(cfg)

    def adapter(name: str, config: AdapterConfig):
        if cfg.routed and name in SHARED:
            config = dataclasses.replace(config, experts="shared_outer")
        if config.kind == "bias":
            config = dataclasses.replace(config, targets=biased_targets(specs))
        factors = random_adapter(rng, specs, config, np.nan if name.startswith("nan") else 0.7)
        return config, factors

    return lora_tree.stack_adapters(
        specs, {name: adapter(name, config) for name, config in CONFIGS.items()}
    )


def tokens(rng, n: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, VOCAB, n).tolist())


def seed(rng) -> int:
    return int(rng.integers(2**32))


def engine_of(base, pages: int, **settings) -> Engine:
    """With a cache of so many pages in each part of the mesh."""
    nbytes = device.page_parts(base.cfg, base.mesh) * device.page_bytes(base.cfg, base.dtype, False)
    return Engine(base, **({"rows": (8,)} | settings), cache_bytes=pages * nbytes)


class World:
    """A base, adapters, some requests, and their answers when each is alone.

    Attributes:
        begin: tokens with which many prompts begin.
        asked, alone: the requests, and the completions of each.
    """

    def __init__(self, base, rng):
        self.base, self.rng = base, rng
        self.stacks, self.slots = random_stacks(rng, base.cfg)
        self.begin = tokens(rng, BOTH)
        begin, hot = self.begin, {"top_p": 0.9, "temperature": 1.3}
        top = {"presence_penalty": 0.5, "top_logprobs": 3}
        fields = [
            {"prompt": (*begin, *tokens(rng, 5)), "max_tokens": 40},
            {"prompt": (*begin, *tokens(rng, 9)), "max_tokens": 36, "n": 3} | hot,
            {"prompt": tokens(rng, 1), "max_tokens": 20, "temperature": 0},
            {"prompt": tokens(rng, 131), "max_tokens": 21, "n": 2} | top,
            {"prompt": (*begin, *tokens(rng, 9)), "max_tokens": 5} | LAST,
        ]
        names = (None, "eight", "one", "more", "bias")
        self.asked = [
            Request(adapter=self.slots.get(name), seed=seed(rng), **how)
            for name, how in zip(names, fields)
        ]
        self.alone = [self.engine(LARGE).generate([r], self.stacks)[0] for r in self.asked]

    def engine(self, pages: int, **settings) -> Engine:
        return engine_of(self.base, pages, **settings)

    def neighbours(self, count: int) -> list[Request]:
        """Random requests; every third is of an adapter that is NaN, others begin as ``asked``
        do.
        """
        rng, out = self.rng, []
        for i in range(count):
            name = rng.choice(NAN) if i % 3 == 0 else SOUND[rng.integers(len(SOUND))]
            begin = self.begin if rng.random() < 0.5 else ()
            how = {
                "presence_penalty": float(rng.choice([0, rng.normal()])),
                "frequency_penalty": float(rng.choice([0, 1])),
                "prompt_logprobs": bool(rng.random() < 0.3),
                "prompt_logprobs_last_n": rng.choice([None, 5]),
                "top_logprobs": int(rng.integers(6)),
                "temperature": float(rng.choice([0, 1, 3])),
                "top_k": int(rng.choice([0, 7])),
                "max_tokens": int(rng.integers(36, 80)),
            }
            prompt = (*begin, *tokens(rng, int(rng.integers(1, 40))))
            out.append(Request(prompt, self.slots.get(name), n=1 + i % 2, seed=seed(rng), **how))
        return out

    def expect(self, answers) -> None:
        for completions, alone in zip(answers, self.alone, strict=True):
            assert len(completions) == len(alone)
            for mine, theirs in zip(completions, alone):
                assert_same(mine, theirs)


def assert_same(mine, theirs) -> None:
    assert mine.tokens == theirs.tokens
    for name in ("logprobs", "drawn_logprobs"):
        np.testing.assert_array_equal(
            *(np.array(getattr(c, name)).view(np.uint64) for c in (mine, theirs)), name
        )
    assert mine.top_logprobs == theirs.top_logprobs
    assert repr(mine.prompt_logprobs) == repr(theirs.prompt_logprobs), "NaN included"
    assert mine.prompt_alternatives == theirs.prompt_alternatives
    assert mine.finish == theirs.finish


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tiny_base) -> World:
    family = request.param
    seeds = int(os.environ["MINT_TEST_SEED"]), zlib.crc32(family.encode())
    return World(tiny_base(family), np.random.default_rng(seeds))


def test_other_rows_their_order_preemption_and_steps_change_no_bit(world):
    done, poor = Counter(), [world.slots[name] for name in NAN]
    for steps in (1, 5, 16):
        # The twin of the first starts first, as the longest, and finds what the call before kept:
        # later, others may have evicted a prompt's states and near pages.
        twin = dataclasses.replace(world.asked[0], max_tokens=81, seed=seed(world.rng))
        others = [twin, *world.neighbours(9)]
        requests = [*world.asked, *others]
        order = world.rng.permutation(len(requests)).tolist()
        engine = world.engine(SMALL, steps=steps)
        # one sample in every row: the cache gets its full size here, and is not allocated again
        engine.generate([dataclasses.replace(twin, max_tokens=1, n=8)], world.stacks)
        answers = engine.generate([requests[i] for i in order], world.stacks)
        found = dict(zip(order, answers, strict=True))
        world.expect([found[i] for i in range(len(world.asked))])
        for i, request in enumerate(others, len(world.asked)):
            is_right = np.isnan if request.adapter in poor else np.isfinite
            assert all(is_right(c.logprobs).all() for c in found[i])
        done += engine.counts
    assert done["preempted"] > 0
    assert done["reused_tokens"] > 0
    assert done["drawn_tokens"] > 1000


def test_hits_of_the_prompts_cache_change_no_bit(world):
    """The second time every whole block is there; requests with the same beginning share it; a NaN
    neighbour's blocks are its own.
    """
    engine = world.engine(LARGE)
    named = [
        dataclasses.replace(r, revision=None if r.adapter is None else f"{r.adapter}")
        for r in world.asked
    ]
    for i, request in enumerate(named):
        engine.generate([request], world.stacks)
        before = dict(engine.counts)
        again = engine.generate([request], world.stacks)
        length, scored = len(request.prompt) - 1, request.first_scored
        # what is to be scored is read again
        whole = (length if scored is None else scored) // PAGE * PAGE
        assert engine.counts["reused_tokens"] - before.get("reused_tokens", 0) == whole
        assert engine.counts["prefilled_tokens"] - before["prefilled_tokens"] == length - whole
        for mine, theirs in zip(again[0], world.alone[i], strict=True):
            assert_same(dataclasses.replace(mine, revision=None), theirs)
    other = dataclasses.replace(named[0], prompt=(*world.begin, *tokens(world.rng, 7)))
    before = engine.counts["reused_tokens"]
    [[hit]] = engine.generate([other], world.stacks)
    assert engine.counts["reused_tokens"] - before == BOTH
    [[cold]] = world.engine(LARGE).generate([other], world.stacks)
    assert_same(hit, cold)


def test_neighbours_that_are_cancelled_change_no_bit(world):
    engine, rng = world.engine(SMALL, steps=5), world.rng
    with engine.serving(world.stacks):
        requests = [*world.neighbours(4), *world.asked, *world.neighbours(4)]
        streams = [engine.submit(request) for request in requests]
        loud = [*streams[:4], *streams[-4:]]
        for stream in loud:
            for piece, _ in zip(pieces(stream), range(int(rng.integers(0, 4)))):
                assert piece.tokens
            stream.cancel()
        world.expect([stream.result(300) for stream in streams[4:-4]])
        ends = [c.finish for stream in loud for c in stream.result(300)]
    assert "cancelled" in ends
    check_schedule(engine.active.schedule)
    assert is_idle(engine.active.schedule)


@pytest.mark.long
@pytest.mark.parametrize(("family", "parts"), [("dense", 4), ("latent", 8)])
def test_a_mesh_of_eight_devices_gives_the_same_tokens(family, parts, rng, mesh, mesh8, tmp_path):
    """Log-probabilities within rounding: sums over split dimensions are ordered otherwise. Its
    tensor pairs have heads of keys each of their own, or rows of latents. What is warm compiles
    nothing there either.
    """
    save_checkpoint(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    one, many = (base_lib.load(str(tmp_path), m) for m in (mesh, mesh8))
    world = World(one, rng)
    engine = engine_of(many, SMALL)
    assert engine.parts == parts
    with jax.set_mesh(many.mesh):  # where a server's slots are
        specs = transformer.abstract(many.cfg)
        stacks = jax.jit(lambda stacks: lora_tree.constrain(stacks, specs))(world.stacks)
    engine.warm(stacks)
    with compilations() as seen:
        answers = engine.generate([*world.asked, *world.neighbours(6)], stacks)
    assert seen == []
    for completions, alone in zip(answers, world.alone):
        for mine, theirs in zip(completions, alone, strict=True):
            assert mine.tokens == theirs.tokens
            for name in ("logprobs", "drawn_logprobs"):
                np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), atol=4e-5)
