"""Views of adapters: values in float64, and of rows that name slots the same bits whatever the
others name, and one program for every mixture.

Axes: B rows, T tokens, L layers, S slots, R rank, D in, F out, V vocab, N heads, H of a head's key,
C latent, E experts, Q rank buckets.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import sharding
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.lora.view import attach_blocks, attach_rows, batch_delta, embedding_delta
from mint_jax.mesh import make_mesh
from mint_jax.models import mla, transformer
from mint_jax.models.config import Latent
from mint_jax.models.experts import expert_mlp
from tests.exchange import decoder_logits
from tests.lora.peft_oracle_test import random_adapter

L, S, D, F, V = 2, 5, 12, 10, 17
LAYER = 1
ENDS = {"q": (D, F), "up": (D, F), "embed": (V, D), "unembed": (D, V)}
# which projections each has
BUCKETS = {1: ("q", "embed"), 2: ("q", "up", "unembed"), 8: ("up", "embed", "unembed")}
MIXTURES = {  # of each rank bucket what the rows name; B rows, each of one bucket or of none
    "nobody": {},
    "one slot": {2: [3] * 8},
    "one slot, and the base": {2: [-1, 3, 3, -1, -1, 3, -1, 3]},
    "one row": {1: [-1] * 7 + [4]},
    "several slots": {8: [0, 1, 2, 3, 4, 0, 1, 2]},
    "several slots, and the base": {1: [-1, 1, 2, -1, 4, 4, 1, -1]},
    "a slot of each bucket": {
        1: [2, -1, -1] * 2 + [2, -1],
        2: [-1, 0, -1] * 2 + [-1, 0],
        8: [-1, -1, 4] * 2 + [-1, -1],
    },
    "several of two, one of the last": {
        1: [0, -1] * 4,
        2: [-1, 1, -1, 2] + [-1] * 4,
        8: [-1] * 5 + [3, -1, -1],
    },
}
MIXTURES["several of two, one of the last"][1][:] = [0, -1, 3, -1, 3, -1, -1, 0]


def _normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def _factors(rng, names, rank, slots=S, layers=L):
    one = lambda n: {  # noqa: E731
        f: _normal(rng, 1 if "embed" in n else layers, slots, rank, ENDS[n][f == "b"]) for f in "ab"
    }
    flat = {n: one(n) for n in names}
    tables = {n: flat.pop(n) for n in ("embed", "unembed") if n in flat}
    return {
        "dense": {
            "attn": {n: flat[n] for n in flat if n == "q"},
            "mlp": {n: flat[n] for n in flat if n == "up"},
        },
        **tables,
    }


def _stacks(rng):
    return {
        rank: AdapterStack(
            _factors(rng, names, rank), rng.uniform(0.5, 3, S).astype(np.float32), rank
        )
        for rank, names in BUCKETS.items()
    }


def _program(fn):
    """``fn`` compiled, with a count of programs of its own."""
    return jax.jit(lambda *args: fn(*args))


def _named(mixture, B=8):
    return {rank: np.array(mixture.get(rank, [-1] * B), np.int32) for rank in BUCKETS}


def _deltas(stacks, slots, x_BTD, tokens_BT):
    return _deltas_of(attach_rows(stacks, slots), x_BTD, tokens_BT, jnp.float32)


def _deltas_of(lora, x_BTD, tokens_BT, dtype):
    layer = lora.at("dense").in_layer(jnp.int32(LAYER))
    assert batch_delta(x_BTD, layer.at("attn").at("k"), F) is None
    return {
        "q": batch_delta(x_BTD, layer.at("attn").at("q"), F),
        "up": batch_delta(x_BTD, layer.at("mlp").at("up"), F),
        "unembed": batch_delta(x_BTD, lora.at("unembed"), V),
        "embed": embedding_delta(tokens_BT, lora.at("embed"), D, dtype),
    }


def _in_float64(stacks, slots, x_BTD, tokens_BT):
    inputs = {"embed": np.eye(V)[tokens_BT]} | dict.fromkeys(
        ("q", "up", "unembed"), x_BTD.astype(np.float64)
    )
    out = {name: np.zeros((*x_BTD.shape[:2], ENDS[name][1])) for name in ENDS}
    for rank, stack in stacks.items():
        held = stack.factors | stack.factors["dense"]["attn"] | stack.factors["dense"]["mlp"]
        for name in BUCKETS[rank]:
            for b, s in enumerate(slots[rank]):
                if s >= 0:
                    a, f = (
                        held[name][n][0 if "embed" in name else LAYER, s].astype(np.float64)
                        for n in "ab"
                    )
                    out[name][b] += inputs[name][b] @ a.T @ f * stack.scale[s]
    return out


@pytest.mark.parametrize("T", [1, 3])
def test_every_mixture_is_right_and_all_are_one_program(T, rng):
    stacks, x, tokens = _stacks(rng), _normal(rng, 8, T, D), rng.integers(V, size=(8, T))
    run = _program(_deltas)
    for name, mixture in MIXTURES.items():
        slots = _named(mixture)
        got, want = run(stacks, slots, x, tokens), _in_float64(stacks, slots, x, tokens)
        for projection, delta in got.items():  # float32 sums of 12 and 8 terms, of size up to 50
            np.testing.assert_allclose(
                delta, want[projection], rtol=0, atol=1e-4, err_msg=f"{name}: {projection}"
            )
            bare = [
                b
                for b in range(8)
                if all(slots[rank][b] < 0 for rank, held in BUCKETS.items() if projection in held)
            ]
            assert not np.any(np.asarray(delta)[bare])
    assert run._cache_size() == 1


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}], ids=str)
def test_eight_devices_give_every_mixture_too(sizes, rng):
    stacks = _stacks(rng)
    x = _normal(rng, 8, 1, D)
    tokens = rng.integers(V, size=(8, 1))
    mesh = make_mesh(sizes)
    run = _program(_deltas)
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, sharding.partition(("batch", None, None), mesh))
        x_rows = jax.device_put(x, rows)
        for name, mixture in MIXTURES.items():
            slots = _named(mixture)
            got, want = run(stacks, slots, x_rows, tokens), _in_float64(stacks, slots, x, tokens)
            for projection, delta in got.items():
                # as above
                np.testing.assert_allclose(
                    delta, want[projection], rtol=0, atol=1e-4, err_msg=f"{name}: {projection}"
                )
    assert run._cache_size() == 1


@pytest.mark.parametrize("T", [1, 3])
def test_blocks_equal_rows_that_name_their_slots(T, rng):
    """Two buckets of blocks of two rows, and the base; bfloat16 accumulates in float32 and has the
    scale in B before it is rounded.
    """
    stacks = {rank: stack for rank, stack in _stacks(rng).items() if rank > 1}
    blocks, x, tokens = {2: [4, 0], 8: [1]}, _normal(rng, 8, T, D), rng.integers(V, size=(8, T))
    slots = {
        2: np.int32([4, 4, 0, 0, -1, -1, -1, -1]),
        8: np.int32([-1, -1, -1, -1, 1, 1, -1, -1]),
    }
    want = _in_float64(stacks, slots, x, tokens)
    stacks = jax.tree.map(jnp.asarray, stacks)
    for dtype, rounding in ((jnp.float32, 2**-20), (jnp.bfloat16, 2**-6)):
        lora = attach_blocks(
            stacks, {b: np.array(s) for b, s in blocks.items()}, base_blocks=1, dtype=dtype
        )
        got = _deltas_of(lora, jnp.asarray(x, dtype), tokens, dtype)
        for name, delta in got.items():
            assert delta.dtype == dtype
            # one rounding of x, of both factors and of the inner product
            np.testing.assert_allclose(
                np.asarray(delta, np.float32),
                want[name],
                rtol=0,
                atol=4 * rounding * np.abs(want[name]).max() + 1e-4,
                err_msg=name,
            )
    with pytest.raises(ValueError, match="7 rows do not divide into 4 equal blocks"):
        _deltas_of(lora, x[:7], tokens[:7], jnp.float32)
    with pytest.raises(ValueError, match="7 rows do not divide into 4 equal blocks"):
        lora.block_of_rows(7)
    assert lora.block_of_rows(8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# Bits: whatever the other rows name.


def _neighbours(rng, B, slots):
    """What rows may name so that row 0 and some more name slot 0: all do; nobody else does; others
    name any slot.
    """
    alone = np.full(B, -1, np.int32)
    mixed = rng.integers(-1, slots, B).astype(np.int32)
    few = np.full(B, 0, np.int32)
    alone[[0, B // 2]], mixed[[0, B // 2, B - 1]] = 0, 0
    mixed[1] = 1
    few[1] = 1
    return [
        np.zeros(B, np.int32),
        alone,
        mixed,
        few,
        np.where(np.arange(B) % 3 == 0, 0, -1).astype(np.int32),
    ]


def _assert_row_bits(run, mixtures):
    """``run(slots)`` gives each row that names slot 0 the same bits in all mixtures, and each row
    of the base too.
    """
    outs = [(slots, jax.tree.leaves(jax.device_get(run(slots)))) for slots in mixtures]
    for slots, leaves in outs[1:]:
        mine = slots == 0
        for got, want in zip(leaves, outs[0][1], strict=True):
            np.testing.assert_array_equal(got[mine], want[mine])
    _, base = outs[1]
    for slots, leaves in outs[2:]:
        mine = (slots < 0) & (outs[1][0] < 0)
        for got, want in zip(leaves, base, strict=True):
            np.testing.assert_array_equal(got[mine], want[mine])


@pytest.mark.bits
@pytest.mark.parametrize(("B", "rank"), [(8, 1), (32, 64), (37, 16)])
def test_a_row_s_bits_are_the_same_whatever_the_others_name(B, rank, rng):
    """One slot in one product, or factors gathered row by row; of a prime number of rows, and of
    several blocks too.
    """
    sizes = {"even": (64, 96), "odd": (45, 37), "wide": (576, 200)}
    factors = {
        n: {"a": _normal(rng, L, 4, rank, d), "b": _normal(rng, L, 4, rank, f)}
        for n, (d, f) in sizes.items()
    }
    stacks = {rank: AdapterStack(factors, rng.uniform(0.5, 3, 4).astype(np.float32), rank)}
    x = {n: _normal(rng, B, 1, d) for n, (d, _) in sizes.items()}

    @jax.jit
    def run(slots, stacks, x):
        lora = attach_rows(stacks, {rank: slots}).in_layer(jnp.int32(LAYER))
        return {n: batch_delta(x[n], lora.at(n), f) for n, (_, f) in sizes.items()}

    _assert_row_bits(lambda slots: run(slots, stacks, x), _neighbours(rng, B, 4))
    assert run._cache_size() == 1


N, H, C = 3, 12, 20
LATENT = Latent(q_latent=40, kv_latent=C, nope=H, rope=8, value=10)


def _absorbed(stacks, slots, q_BTNH, o_BTNC, w_CNF):
    lora = attach_rows(stacks, slots).in_layer(jnp.int32(LAYER))
    key = mla._absorb_key(q_BTNH, w_CNF[..., :H], lora, LATENT)
    return key, mla._absorb_value(o_BTNC, w_CNF[..., H:], lora, LATENT)


def _absorbed_case(rng, rank, B):
    factors = {
        "a": _normal(rng, L, 4, rank, C),
        "b": _normal(rng, L, 4, rank, N * (H + LATENT.value)),
    }
    stack = AdapterStack(factors, rng.uniform(0.5, 3, 4).astype(np.float32), rank)
    return (
        stack,
        _normal(rng, B, 1, N, H),
        _normal(rng, B, 1, N, C),
        _normal(rng, C, N, H + LATENT.value),
    )


@pytest.mark.bits
@pytest.mark.parametrize(("rank", "B"), [(1, 8), (8, 32), (2, 37)])
def test_absorbed_factors_of_latent_attention_are_right_and_a_row_s_bits_its_own(rank, B, rng):
    stack, q, o, w = _absorbed_case(rng, rank, B)
    run = _program(_absorbed)
    mixtures = _neighbours(rng, B, 4)
    for slots in mixtures:
        key, value = run({rank: stack}, {rank: slots}, q, o, w)
        for b, s in enumerate(slots):
            a, f = (stack.factors[n][LAYER, max(s, 0)].astype(np.float64) for n in "ab")
            merged = w.astype(np.float64) + (a.T @ f * stack.scale[s]).reshape(w.shape) * (s >= 0)
            for got, want in (
                (key[b, 0], np.einsum("nh,cnh->nc", q[b, 0], merged[..., :H])),
                (value[b, 0], np.einsum("nc,cnv->nv", o[b, 0], merged[..., H:])),
            ):
                # float32 sums of 20 and R terms of size 10
                np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * rank * 100)
        for slot in (0, 3):
            spoilt = run({rank: _spoilt(stack, slot, rng)}, {rank: slots}, q, o, w)
            for got, want in zip(spoilt, (key, value)):
                np.testing.assert_array_equal(
                    np.asarray(got)[slots != slot], np.asarray(want)[slots != slot]
                )
    _assert_row_bits(lambda slots: run({rank: stack}, {rank: slots}, q, o, w), mixtures)
    assert run._cache_size() == 1


# Isolation: another slot's factors are not finite.


def _spoilt(stack, slot, rng):
    """One slot full of NaN and infinities."""

    def spoil(leaf):
        leaf = leaf.copy()
        leaf[:, slot] = rng.choice(
            np.array([np.nan, np.inf, -np.inf], np.float32), leaf[:, slot].shape
        )
        return leaf

    return AdapterStack(jax.tree.map(spoil, stack.factors), stack.scale, stack.rank)


@pytest.mark.bits
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("mixture", ["one slot, and the base", "several of two, one of the last"])
def test_a_slot_that_is_not_finite_changes_no_bit_of_other_rows(mixture, T, rng):
    stacks = _stacks(rng)
    x = _normal(rng, 8, T, D)
    tokens = rng.integers(V, size=(8, T))
    slots = _named(MIXTURES[mixture])
    run = _program(_deltas)
    clean = jax.device_get(run(stacks, slots, x, tokens))
    for rank, stack in stacks.items():
        for slot in range(S):
            got = jax.device_get(run(stacks | {rank: _spoilt(stack, slot, rng)}, slots, x, tokens))
            others = slots[rank] != slot
            for name in got:
                np.testing.assert_array_equal(got[name][others], clean[name][others])
                assert (
                    not np.isfinite(got[name][~others]).all(axis=(1, 2)).any()
                    or name not in BUCKETS[rank]
                )


# Experts: rows of one expert and of several adapters stand together.

E, X = 6, 3
EXPERT_ENDS = {"gate": (D, F), "up": (D, F), "down": (F, D)}


def _expert_case(rng, ranks, B, T):
    p = {n: {"w": _normal(rng, E, *ends) * ends[0] ** -0.5} for n, ends in EXPERT_ENDS.items()}
    stacks = {}
    for rank in ranks:
        # the first does not adapt the gate
        names = ["up", "down"] if rank == ranks[0] and len(ranks) > 1 else list(EXPERT_ENDS)
        factors = {
            n: {f: _normal(rng, L, S, E, rank, EXPERT_ENDS[n][f == "b"]) * 0.4 for f in "ab"}
            for n in names
        }
        stacks[rank] = AdapterStack(factors, rng.uniform(0.5, 3, S).astype(np.float32), rank)
    ids = rng.integers(-1, E, (B, T, X)).astype(np.int32)
    return stacks, p, _normal(rng, B, T, D), ids


def _experts(stacks, slots, p, x_BTD, ids):
    """What each row's experts make of its tokens, ``[B, T, X, D]``."""
    lora = attach_rows(stacks, slots)
    B, T, _ = x_BTD.shape
    block = jnp.repeat(lora.block_of_rows(B), T * X)
    y = expert_mlp(
        x_BTD.reshape(B * T, -1), X, ids.reshape(-1), block, p, lora.in_layer(jnp.int32(LAYER))
    )
    return y.reshape(B, T, X, D)


def _expert_mixtures(rng, ranks, B):
    """Nobody, one slot, several of one bucket, several of all."""
    none = {rank: np.full(B, -1, np.int32) for rank in ranks}
    bucket = rng.integers(-1, len(ranks), B)
    every = {
        rank: np.where(bucket == i, rng.integers(0, S, B), -1).astype(np.int32)
        for i, rank in enumerate(ranks)
    }
    one = np.where(np.arange(B) % 3 == 0, -1, 4).astype(np.int32)
    return [
        none,
        none | {ranks[-1]: one},
        none | {ranks[0]: rng.integers(-1, S, B).astype(np.int32)},
        every,
    ]


@pytest.mark.bits
@pytest.mark.parametrize("ranks", [(1, 32)])
def test_another_slot_of_the_experts_changes_no_bit(ranks, rng):
    """Neither by what it holds, be it NaN, nor by which rows name it."""
    run, (stacks, p, x, ids) = _program(_experts), _expert_case(rng, ranks, 8, 2)
    for slots in _expert_mixtures(rng, ranks, 8)[1:]:
        clean = np.asarray(run(stacks, slots, p, x, ids))
        for rank in ranks:
            for slot in (0, 4):
                got = np.asarray(
                    run(stacks | {rank: _spoilt(stacks[rank], slot, rng)}, slots, p, x, ids)
                )
                np.testing.assert_array_equal(got[slots[rank] != slot], clean[slots[rank] != slot])
        moved = {rank: named.copy() for rank, named in slots.items()}
        moved[ranks[0]][4:], moved[ranks[1]][4:] = rng.integers(-1, S, 4), -1
        np.testing.assert_array_equal(np.asarray(run(stacks, moved, p, x, ids))[:4], clean[:4])


# Whole decoders.

DECODERS = {
    "llama": [
        AdapterConfig(1, 0.5, ("embed", "gate", "unembed")),
        *(AdapterConfig(3, a, ("q", "down", "embed")) for a in (7.0, 2.0)),
    ],
    "deepseek_v3": [
        AdapterConfig(2, 4.0, ("kv_a", "kv_b", "gate")),
        AdapterConfig(2, 1.0, ("kv_b", "down")),
        AdapterConfig(1, 3.0, ("q_b", "up")),
    ],
}


def _resident(rng, specs, configs):
    return tree.stack_adapters(
        specs, {str(i): (c, random_adapter(rng, specs, c)) for i, c in enumerate(configs)}
    )


def _blocks_and_rows(rng, stacks, slots):
    """Adapters of blocks of two rows, the last block the base's; the order in which rows name the
    same slots, and they.
    """
    by_bucket = {b: [s.index for s in slots.values() if s.bucket == b] for b in stacks}
    blocks = attach_blocks(stacks, {b: np.array(s) for b, s in by_bucket.items()}, base_blocks=1)
    named = [(b, s) for b in sorted(by_bucket) for s in by_bucket[b] for _ in range(2)] + [
        (0, -1)
    ] * 2
    order = rng.permutation(len(named))
    return (
        blocks,
        order,
        {
            b: np.array([named[i][1] if named[i][0] == b else -1 for i in order], np.int32)
            for b in stacks
        },
    )


@pytest.mark.parametrize(("family", "T"), [("llama", 5), ("deepseek_v3", 1)])
def test_a_decoder_s_rows_equal_its_blocks(family, T, rng, tiny_base):
    base = tiny_base(family)
    stacks, slots = _resident(rng, transformer.abstract(base.cfg), DECODERS[family])
    blocks, order, named = _blocks_and_rows(rng, stacks, slots)
    tokens = rng.integers(97, size=(len(order), T)).astype(np.int32)
    want = np.asarray(decoder_logits(base.params, blocks, tokens, cfg=base.cfg))
    got = np.zeros_like(want)
    got[order] = decoder_logits(
        base.params, attach_rows(stacks, named), tokens[order], cfg=base.cfg
    )
    # float32 sums in another order
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())
    bare = np.asarray(decoder_logits(base.params, None, tokens, cfg=base.cfg))
    assert np.abs(want - bare)[:-2].max(axis=(1, 2)).min() > 1e-3, (
        "an adapter that does nothing says nothing"
    )
