"""Layers with a state against recurrences in float64, transformers' of a gated delta net, and the
definitions of Mamba-2 and Kimi Delta Attention: packed rows with parents, blocks and steps of a
cache.
"""

import functools
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from mint_jax.models import hf, state
from mint_jax.models.attention import Segments
from mint_jax.models.paged import EMPTY, FOLLOW, StateSlots
from pallas_kernels.state_step import state_step
from tests import oracles
from tests.exchange import decoder_logits

B, N, K, V, TAPS = 2, 3, 8, 5, 4


def rows(rng, T):
    """Segments of packed rows: prompts of any length, each with up to five children."""
    own, parent, number = [], [], 0
    while len(own) < T:
        prompt, n = number, int(rng.integers(1, 90))
        own, parent = own + [prompt] * n, parent + [prompt] * n
        for _ in range(rng.integers(0, 6)):
            number, n = number + 1, int(rng.integers(1, 70))
            own, parent = own + [number] * n, parent + [prompt] * n
        number += 1
    return own[:T], parent[:T]


def arguments(rng, T, channels=False):
    """Some decays of channels are strong: exp(20) over 64 tokens exceeds float64."""
    q, k = rng.normal(size=(2, B, T, N, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(B, T, N, V)), rng.uniform(size=(B, T, N))
    shape = (B, T, N, K) if channels else (B, T, N)
    strongest = 20 if channels else 3
    decay = -rng.exponential(size=shape) * rng.choice([0.01, 0.1, strongest], size=shape)
    return q, k, v, decay, beta


def exact(corrects, *args):
    """``o [T, N, V]`` of one sequence, torch, from an empty state; float64."""
    q, k, v, decay, beta = args
    if corrects and decay.ndim == 2:
        args = (x[None] for x in (q * K**0.5, k, v, decay, beta))
        return torch_recurrent_gated_delta_rule(*args)[0][0]
    state, out = torch.zeros(N, K, V, dtype=torch.float64), []
    for t in range(len(q)):
        state = decay[t].exp().reshape(N, -1, 1) * state
        value = v[t] - torch.einsum("nk,nkv->nv", k[t], state) if corrects else v[t]
        state = state + torch.einsum("nk,nv->nkv", k[t], beta[t][:, None] * value)
        out.append(torch.einsum("nk,nkv->nv", q[t], state))
    return torch.stack(out)


def floats(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize(
    ("T", "corrects", "channels"),
    [
        *((T, True, False) for T in (1, 63, 300)),
        *((300, False, False), (300, True, True)),
        pytest.param(300, False, True, marks=pytest.mark.long),
    ],
)
def test_packed_rows_are_their_lineages_apart(rng, T, corrects, channels):
    own, parent = (np.array(x, np.int32) for x in zip(*(rows(rng, T) for _ in range(B))))
    args = arguments(rng, T, channels)
    of = state.lineage(Segments(jnp.asarray(own), jnp.asarray(parent)))
    made = np.asarray(
        jax.jit(lambda *x: state.recurrence(*x, of=of, corrects=corrects))(*floats(args))
    )
    before = np.asarray(state.previous(of, TAPS))
    for b in range(B):
        for segment in np.unique(own[b]):
            [mine] = np.where(own[b] == segment)
            [above] = np.where(own[b] == parent[b, mine[0]])
            ids = mine if above[0] == mine[0] else np.concatenate([above, mine])
            first = len(ids) - len(mine)
            want = exact(corrects, *(torch.tensor(x[b, ids]) for x in args))[first:].numpy()
            # float32 against float64; a chunk's triangular system has 64 rows of size 1, and
            # without corrections a state sums over all tokens
            atol = 2e-4 if corrects else 1e-5 * max(1, np.abs(want).max())
            np.testing.assert_allclose(made[b, mine], want, rtol=0, atol=atol)
            for i, token in enumerate(mine, first):
                ancestors = [ids[i - m] if i >= m else -1 for m in range(1, TAPS)]
                assert before[b, token].tolist() == ancestors


@pytest.mark.parametrize(
    ("corrects", "channels", "siblings"),
    [
        *((True, False, True), (True, False, False), (False, False, False)),
        pytest.param(True, True, False, marks=pytest.mark.long),
        pytest.param(False, True, True, marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_the_recurrence(rng, corrects, channels, siblings):
    T = 130
    args, g = arguments(rng, T, channels), rng.normal(size=(B, T, N, V))
    # Segments [first, end) that follow the first one, or are the first
    ends = [0, 20, 70, 100, T] if siblings else [0, T]
    own = np.repeat(np.arange(len(ends) - 1), np.diff(ends))[None].repeat(B, axis=0)
    one = state.lineage(Segments(jnp.asarray(own), jnp.zeros((B, T), jnp.int32)))

    def loss(*x):
        return jnp.sum(state.recurrence(*x, of=one, corrects=corrects) * g)

    made = jax.jit(jax.grad(loss, argnums=range(5)))(*floats(args))
    leaves = [torch.tensor(x, requires_grad=True) for x in args]
    for b in range(B):
        for first, end in itertools.pairwise(ends):
            ids = [*range(ends[1] if first else 0), *range(first, end)]
            out = exact(corrects, *(x[b, ids] for x in leaves))[first - end :]
            (out * torch.tensor(g[b, first:end])).sum().backward()
    for ours, theirs in zip(made, leaves, strict=True):
        want = theirs.grad.numpy()
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("siblings", [True, False])
def test_a_short_convolution_and_its_gradient_follow_lineages(rng, siblings):
    T, W = 90, 3
    own = np.repeat([0, 1, 2, 3] if siblings else [0, 1, 1, 1], [30, 20, 2, 38])[None]
    before = state.previous(
        state.lineage(Segments(jnp.asarray(own), jnp.zeros((1, T), jnp.int32))), TAPS
    )
    x, w, g = rng.normal(size=(1, T, W)), rng.normal(size=(TAPS, W)), rng.normal(size=(1, T, W))
    made, pull = jax.vjp(lambda y: state.short_convolution(y, *floats([w]), before), *floats([x]))
    want, gradient = x * w[-1], g * w[-1]
    for t, m in itertools.product(range(T), range(1, TAPS)):
        if (i := before[0, t, m - 1]) >= 0:
            want[0, t] += x[0, i] * w[-1 - m]
            gradient[0, i] += g[0, t] * w[-1 - m]
    # float32 against float64
    np.testing.assert_allclose(made, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(pull(*floats([g]))[0], gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("bad", "corrects", "channels"),
    [
        *((np.nan, True, False), (np.inf, True, False), (np.nan, False, False)),
        (np.nan, True, True),
        pytest.param(np.inf, True, True, marks=pytest.mark.long),
    ],
)
def test_blocks_in_any_calls_and_steps_are_the_recurrence(rng, bad, corrects, channels):
    """A row's blocks in calls beside another row's, which is not finite: states pass from block to
    block, through slots between calls, and to single tokens.
    """
    T, P = 101, 32
    q, k, v, decay, beta = (x[0] for x in arguments(rng, T, channels))
    want = exact(corrects, *map(torch.tensor, (q, k, v, decay, beta))).numpy()
    blocks_of = jax.jit(functools.partial(state._blocks, corrects=corrects))
    pool = jnp.full((1, 4, N, K, V), np.nan, jnp.float32)  # slots hold anything before

    def call(blocks, load, save, keep, pool):
        """Blocks ``[C]`` by number, -1 for a neighbour's."""
        take = [
            [np.full((P, *x.shape[1:]), bad) if b < 0 else x[b * P : (b + 1) * P] for b in blocks]
            for x in (q, k, v, decay, beta)
        ]
        count = [min(P, T - b * P) if b >= 0 else P for b in blocks]
        pad = [
            np.stack([np.pad(y, ((0, P - len(y)),) + ((0, 0),) * (y.ndim - 1)) for y in x])
            for x in take
        ]
        used = np.arange(P)[None] < np.array(count)[:, None]
        pad[3:] = (np.where(used.reshape(*used.shape, *(1,) * (x.ndim - 2)), x, 0) for x in pad[3:])
        slots = StateSlots(*(jnp.asarray(x, jnp.int32) for x in (load, save, keep, count)))
        out, pool = blocks_of(floats(pad), slots, pool, jnp.int32(0))
        return [np.asarray(o)[:n] for o, n in zip(out, count)], pool

    first, pool = call([0, 1, -1], [EMPTY, FOLLOW, EMPTY], [9, 2, 3], [0, 9, 9], pool)
    second, pool = call([-1, 2], [3, 2], [3, 2], [9, 9], pool)
    again, pool = call([1], [0], [1], [9], pool)
    # the snapshot after block 0 gives the bits that followed it
    assert again[0].tobytes() == first[1].tobytes()
    whole = np.concatenate([first[0], first[1], second[1]])
    np.testing.assert_allclose(whole, want[:96], rtol=0, atol=2e-4)
    step = jax.jit(functools.partial(state_step, corrects=corrects, implementation="xla"))
    decay, slot = decay.reshape(T, N, -1), jnp.full(1, 2, jnp.int32)
    for t in range(96, T):
        one = floats(x[t][None] for x in (q, k, v, decay, beta))
        o, pool = step(*one, pool, jnp.int32(0), slot, slot)
        np.testing.assert_allclose(o[0], want[t], rtol=0, atol=2e-4)


@pytest.mark.parametrize("shortest", [0.001, 0.9])
def test_time_steps_have_a_least_length_in_any_call(shortest, hf_dirs, mesh, tmp_path, rng):
    """As in transformers' chunks; its decoding step lacks it."""
    directory = shutil.copytree(hf_dirs("nemotron_h_dense"), tmp_path / "base")
    config = json.loads((directory / "config.json").read_text()) | {"time_step_min": shortest}
    (directory / "config.json").write_text(json.dumps(config))
    cfg, tokens = hf.read_model(directory), rng.integers(3, 97, (1, 40)).astype(np.int32)
    params = hf.load(directory, cfg, mesh)
    theirs = oracles.torch_logits(oracles.torch_model(directory), tokens)
    ours = decoder_logits(params, None, tokens, cfg=cfg)
    # float32 sums in another order
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
