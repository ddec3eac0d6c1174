"""Views of adapters: values in float64, and of rows that name slots the same bits whatever the
others name, and one program for every mixture.

Axes: B rows, T tokens, L layers, S slots, R rank, D in, F out, V vocab, N heads, H of a head's key,
C latent, E experts, Q rank buckets.
"""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.lora.dropout import Dropout, numbers
from mint_jax.lora.tree import AdapterStack
from mint_jax.lora.view import attach_blocks, attach_rows, batch_delta, embedding_delta
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import mla
from mint_jax.models.config import Latent

L, S, D, F, V = 2, 5, 12, 10, 17
LAYER = 1
ENDS = {"q": (D, F), "up": (D, F), "embed": (V, D), "unembed": (D, V)}
# which projections each has
BUCKETS = {1: ("q", "embed"), 2: ("q", "up", "unembed"), 8: ("up", "embed", "unembed")}
MIXTURES = {  # of each rank bucket what the rows name; B rows, each of one bucket or of none
    "nobody": {},
    "one slot, and the base": {2: [-1, 3, 3, -1, -1, 3, -1, 3]},
    "several slots, and the base": {1: [-1, 1, 2, -1, 4, 4, 1, -1]},
    "a slot of each bucket": {
        1: [2, -1, -1] * 2 + [2, -1],
        2: [-1, 0, -1] * 2 + [-1, 0],
        8: [-1, -1, 4] * 2 + [-1, -1],
    },
    "several of two, one of the last": {
        1: [0, -1, 3, -1, 3, -1, -1, 0],
        2: [-1, 1, -1, 2] + [-1] * 4,
        8: [-1] * 5 + [3, -1, -1],
    },
}


def _normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


PLACES = {"q": "attn", "up": "mlp"}


def _factors(rng, names, rank):
    flat = {}
    for n in names:
        layers, place = (
            (1, n) if "embed" in n else (L, f"dense/{'attn' if n == 'q' else 'mlp'}/{n}")
        )
        flat |= {f"{place}/{f}": _normal(rng, layers, S, rank, ENDS[n][f == "b"]) for f in "ab"}
    return params_lib.nest(flat)


def _stack(rng, factors, rank, slots=S):
    return AdapterStack(factors, rng.uniform(0.5, 3, slots).astype(np.float32), rank)


def _stacks(rng):
    return {r: _stack(rng, _factors(rng, names, r), r) for r, names in BUCKETS.items()}


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
    inputs = dict.fromkeys(("q", "up", "unembed"), x_BTD.astype(np.float64))
    inputs["embed"] = np.eye(V)[tokens_BT]
    out = {name: np.zeros((*x_BTD.shape[:2], ENDS[name][1])) for name in ENDS}
    for rank, stack in stacks.items():
        dense = stack.factors["dense"]
        held = stack.factors | dense.get("attn", {}) | dense.get("mlp", {})
        for name in BUCKETS[rank]:
            layer = 0 if "embed" in name else LAYER
            for b, s in enumerate(slots[rank]):
                if s >= 0:
                    a, f = (held[name][n][layer, s].astype(np.float64) for n in "ab")
                    out[name][b] += inputs[name][b] @ a.T @ f * stack.scale[s]
    return out


@pytest.mark.parametrize(
    ("T", "sizes"), [(1, {}), (3, {}), (1, {"data": 2, "fsdp": 2, "tensor": 2})], ids=str
)
def test_every_mixture_is_right_and_all_are_one_program(T, sizes, rng):
    stacks, x, tokens = _stacks(rng), _normal(rng, 8, T, D), rng.integers(V, size=(8, T))
    run, mesh = _program(_deltas), make_mesh(sizes) if sizes else single_device_mesh()
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, sharding.partition(("batch", None, None), mesh))
        x_rows = jax.device_put(x, rows)
        for mixture in MIXTURES.values():
            slots = _named(mixture)
            got, want = run(stacks, slots, x_rows, tokens), _in_float64(stacks, slots, x, tokens)
            # float32 sums of 12 and 8 terms, up to 50
            chex.assert_trees_all_close(
                jax.device_get(got), jax.tree.map(np.float32, want), rtol=0, atol=1e-4
            )
    assert run._cache_size() == 1


@pytest.mark.parametrize("T", [1, 3])
def test_blocks_equal_rows_that_name_their_slots(T, rng):
    """Two buckets of blocks of two rows, and the base; bfloat16 accumulates in float32 and has the
    scale in B before it is rounded.
    """
    stacks = {rank: stack for rank, stack in _stacks(rng).items() if rank > 1}
    blocks = {2: np.array([4, 0]), 8: np.array([1])}
    x, tokens = _normal(rng, 8, T, D), rng.integers(V, size=(8, T))
    slots = {2: [4, 4, 0, 0, -1, -1, -1, -1], 8: [-1, -1, -1, -1, 1, 1, -1, -1]}
    want = _in_float64(stacks, slots, x, tokens)
    stacks = jax.tree.map(jnp.asarray, stacks)
    for dtype, rounding in ((jnp.float32, 2**-20), (jnp.bfloat16, 2**-6)):
        lora = attach_blocks(stacks, blocks, base_blocks=1, dtype=dtype)
        for name, delta in _deltas_of(lora, jnp.asarray(x, dtype), tokens, dtype).items():
            assert delta.dtype == dtype
            # one rounding of x, of both factors and of the inner product
            most = 4 * rounding * np.abs(want[name]).max() + 1e-4
            got = np.asarray(delta, np.float32)
            np.testing.assert_allclose(got, want[name], rtol=0, atol=most, err_msg=name)
    with pytest.raises(ValueError, match="7 rows do not divide into 4 equal blocks"):
        _deltas_of(lora, x[:7], tokens[:7], jnp.float32)
    assert lora.block_of_rows(8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


# Bits: whatever the other rows name.


@pytest.mark.bits
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("mixture", ["one slot, and the base", "several of two, one of the last"])
def test_a_slot_that_is_not_finite_changes_no_bit_of_other_rows(mixture, T, rng):
    """In every rank bucket and projection, tables too: 0 x NaN is NaN."""
    stacks, x, tokens = _stacks(rng), _normal(rng, 8, T, D), rng.integers(V, size=(8, T))
    slots, run = _named(MIXTURES[mixture]), _program(_deltas)
    clean = jax.device_get(run(stacks, slots, x, tokens))
    for rank, slot in itertools.product(stacks, range(S)):
        spoilt = stacks | {rank: _spoilt(stacks[rank], slot, rng)}
        others = slots[rank] != slot
        for name, delta in jax.device_get(run(spoilt, slots, x, tokens)).items():
            np.testing.assert_array_equal(delta[others], clean[name][others])
            if name in BUCKETS[rank]:
                assert not np.isfinite(delta[~others]).all(axis=(1, 2)).any()


def _neighbours(rng, B, slots):
    """All rows name slot 0; some do and no other slot; others name any slot; all but one."""
    every, few, thirds = np.zeros((3, B), np.int32)
    mixed = rng.integers(-1, slots, B).astype(np.int32)
    mixed[[0, B // 2, B - 1]] = 0
    mixed[1] = few[1] = 1
    thirds[np.arange(B) % 3 > 0] = -1
    alone = np.where(np.isin(np.arange(B), [0, B // 2]), 0, -1).astype(np.int32)
    return [every, alone, mixed, few, thirds]


def _assert_row_bits(run, mixtures):
    """``run(slots)`` gives each row that names slot 0, or none, the same bits in all mixtures."""
    outs = [(slots, jax.tree.leaves(jax.device_get(run(slots)))) for slots in mixtures]
    for own, of in ((0, outs[0]), (-1, outs[1])):
        for slots, leaves in outs[1:]:
            mine = (slots == own) & (of[0] == own)
            for got, want in zip(leaves, of[1], strict=True):
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
    stacks = {rank: _stack(rng, factors, rank, 4)}
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


@pytest.mark.bits
@pytest.mark.parametrize(("rank", "B"), [(1, 8), (8, 32), (2, 37)])
def test_absorbed_factors_of_latent_attention_are_right_and_a_row_s_bits_its_own(rank, B, rng):
    ends = {"a": C, "b": N * (H + LATENT.value)}
    stack = _stack(rng, {f: _normal(rng, L, 4, rank, end) for f, end in ends.items()}, rank, 4)
    q, o, w = (_normal(rng, *s) for s in ((B, 1, N, H), (B, 1, N, C), (C, N, H + LATENT.value)))
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
            for got, want in zip(jax.device_get(spoilt), jax.device_get((key, value))):
                np.testing.assert_array_equal(got[slots != slot], want[slots != slot])
    _assert_row_bits(lambda slots: run({rank: stack}, {rank: slots}, q, o, w), mixtures)
    assert run._cache_size() == 1


# Isolation: another slot's factors are not finite.


def _spoilt(stack, slot, rng):
    """One slot full of NaN and infinities."""

    def spoil(leaf):
        leaf = leaf.copy()
        leaf[:, slot] = rng.choice(np.float32([np.nan, np.inf, -np.inf]), leaf[:, slot].shape)
        return leaf

    return stack.replace(factors=jax.tree.map(spoil, stack.factors))


def test_dropout_keeps_the_given_share_and_every_mask_is_its_own(rng):
    """Binomial bounds of six standard deviations."""
    T, width, rates = 64, 512, np.float32([0.0, 0.1, 0.75])
    seed, tokens = int(rng.integers(1 << 62)), rng.integers(97, size=T).astype(np.int32)
    drawn = ((seed, 0, tokens), (seed + 1, 0, tokens), (seed, 1, tokens), (seed, 0, tokens + 1))
    dropout, *others = (Dropout(rates, np.broadcast_to(numbers(*one), (3, 1, T))) for one in drawn)
    others += [dropout.fold(update) for update in (0, 1, 2)]
    others += [dropout.below("q"), dropout.below("k"), dropout.below("q").fold(1)]
    own, *masks = (np.array(one.keeps(width)) for one in (dropout, *others))
    masks = [own, *masks, *(np.roll(own, 1, axis) for axis in (2, 3))]  # next token and feature

    def assert_share(is_true, share):
        bound = 6 * np.sqrt(share * (1 - share) / is_true.size)
        np.testing.assert_allclose(is_true.mean(), share, rtol=0, atol=bound)

    for p, rate in enumerate(np.float64(rates)):
        for mask in masks:
            assert_share(mask[p], 1 - rate)
        for one, other in itertools.combinations(masks, 2):
            assert_share(one[p] == other[p], rate**2 + (1 - rate) ** 2)
    x = _normal(rng, 3, 1, T, width)
    dropped = np.array(dropout.apply(x))
    np.testing.assert_array_equal(dropped[0], x[0])
    kept = np.where(own, x / (1 - rates)[:, None, None, None], 0)
    np.testing.assert_allclose(dropped, kept, rtol=3e-7)  # two roundings
