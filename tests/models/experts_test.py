"""Routed experts with packed adapters against a loop over tokens, experts and adapters in float64.

Axes: B rows, T tokens, X experts of a token, E experts, D model width, F expert width, P blocks, R
rank.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.lora.config import SHARED_OUTER
from mint_jax.lora.view import AdapterView, RankBucket
from mint_jax.models.expert_parallel import routed
from tests.marks import first
from tests.pallas_kernels import gpu

X, D, F = 3, 12, 8
WIDTHS = {"gate": (D, F), "up": (D, F), "down": (F, D)}
# blocks of each rank bucket, the base's blocks; two rows a block
BLOCKS = {
    "base": ({}, 3),
    "one_bucket": ({2: 3}, 0),
    "two_buckets": ({2: 2, 4: 3}, 0),
    "buckets_and_base": ({1: 1, 4: 2}, 2),
    "one_policy": ({8: 1}, 0),
}
BLOCKS |= {"shared": ({2: 2, 4: 1}, 1), "both_forms": ({2: 2, 4: 2}, 1)}
# projections that the first bucket does not adapt
PARTLY = {"one_bucket": (), "two_buckets": ("up",), "both_forms": ("down",)}
# forms of each bucket's factors
EACH, OUTER = ("each",), (SHARED_OUTER,)
FORMS = {"shared": (OUTER, OUTER), "both_forms": (OUTER, EACH + OUTER)}


def _normal(rng, shape, scale=1.0):
    return jnp.asarray(rng.normal(size=shape, scale=scale), jnp.float32)


def problem(rng, counts, base, left_out, rows=2, E=6, T=9, forms=()):
    """x, ids, weights, matrices, adapters and the outputs' gradient; the first bucket leaves out
    some projections, and every block has ``rows`` rows.
    """

    def factor(form, name, f, P, rank):
        is_shared = form == SHARED_OUTER and f == ("b" if name == "down" else "a")
        experts = () if is_shared else (E,)
        return _normal(rng, (P, *experts, rank, WIDTHS[name][f == "b"]), 0.4)

    p = {n: {"w": _normal(rng, (E, *ends), ends[0] ** -0.5)} for n, ends in WIDTHS.items()}
    buckets = []
    for i, (rank, P) in enumerate(counts.items()):
        names = [n for n in WIDTHS if i or n not in left_out]
        own = {
            form: {n: {f: factor(form, n, f, P, rank) for f in "ab"} for n in names}
            for form in (forms[i] if forms else EACH)
        }
        buckets.append(own.pop("each", {}) | own)
    lora = AdapterView(
        tuple(map(RankBucket, buckets)), blocks=tuple(counts.values()), base_blocks=base
    )
    B = rows * lora.total_blocks
    ids = np.argsort(rng.random((B, T, E)), axis=-1)[..., :X].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1  # visits nobody
    ids[:, 0] = -1
    x, g = (_normal(rng, (B, T, WIDTHS["gate"][0])) for _ in range(2))
    return x, ids, _normal(rng, (B, T, X)), p, lora, g


def _problem(rng, name):
    return problem(rng, *BLOCKS[name], PARTLY.get(name, ()), forms=FORMS.get(name, ()))


def _loop(x_BTD, ids, weights_BTX, p, lora, g_BTD):
    """The outputs, and the gradients of ``sum(outputs * g)`` with respect to x, weights and
    factors; each visit alone.
    """

    def leaf(v):
        return torch.tensor(np.asarray(v, np.float64), requires_grad=True)

    x, weights, factors = leaf(x_BTD), leaf(weights_BTX), jax.tree.map(leaf, lora.buckets)
    matrices = {n: torch.tensor(np.asarray(leaf["w"], np.float64)) for n, leaf in p.items()}
    block_of = [(b, i) for b, n in enumerate(lora.blocks) for i in range(n)] + [
        None
    ] * lora.base_blocks
    rows = x.shape[0] // lora.total_blocks

    def project(h, name, e, block):
        y = h @ matrices[name][e]
        tree = {} if block is None else factors[block[0]].factors
        for form in (tree, tree.get(SHARED_OUTER, {})):
            if name in form:
                a, b = (form[name][f][block[1]] for f in "ab")
                a, b = (w if w.ndim == 2 else w[e] for w in (a, b))
                y = y + (a @ h) @ b
        return y

    total, out = torch.zeros((), dtype=torch.float64), np.zeros(x.shape)
    for b, t, k in np.argwhere(ids >= 0):
        e, block = ids[b, t, k], block_of[b // rows]
        gate, up = project(x[b, t], "gate", e, block), project(x[b, t], "up", e, block)
        y = weights[b, t, k] * project(torch.nn.functional.silu(gate) * up, "down", e, block)
        out[b, t] += y.detach().numpy()
        total = total + y @ torch.tensor(np.asarray(g_BTD[b, t], np.float64))
    total.backward()
    return out, jax.tree.map(
        lambda v: np.zeros(v.shape) if v.grad is None else v.grad.numpy(), (x, weights, factors)
    )


@jax.jit
def _ours(x, ids, weights, p, lora, g):
    def loss(x, weights, buckets):
        y = routed(x, ids, weights, p, lora.replace(buckets=buckets))
        return jnp.sum(y * g), y

    grads, y = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, lora.buckets)
    return y, grads


def _assert_close(got, want):
    # float32: three products of at most 10 terms one after the other, sums over at most 20 visits
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max())),
        got,
        want,
    )


def of_stack(p, layer: int, layers: int = 3):
    """The same experts as one layer of a stack whose others are NaN."""
    return {
        n: {
            "w": jnp.full((layers, *leaf["w"].shape), jnp.nan).at[layer].set(leaf["w"]),
            "layer": jnp.int32(layer),
        }
        for n, leaf in p.items()
    }


@pytest.mark.parametrize("form", ["cpu", "accelerators"])
@pytest.mark.parametrize("name", first(1, ["buckets_and_base", "base"]))
def test_a_layer_of_a_stack_is_that_layer_alone(name, form, request, rng):
    if form == "accelerators":
        request.getfixturevalue("form_of_accelerators")
    x, ids, weights, p, lora, g = _problem(rng, name)
    for layer in (0, 2):
        got = _ours(x, ids, weights, of_stack(p, layer), lora, g)
        want = _ours(x, ids, weights, p, lora, g)
        # their slice's layout is pinned, and a CPU's product adds in another order where the layout
        # is another
        if form == "accelerators":
            _assert_close(got, want)
        else:
            jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((n, "cpu") for n in BLOCKS),
        *((n, "accelerators") for n in ("two_buckets", "shared", "both_forms")),
    ],
)
def test_outputs_and_gradients_equal_a_loop(name, form, request, rng):
    if form == "accelerators":
        request.getfixturevalue("form_of_accelerators")
    x, ids, weights, p, lora, g = problem = _problem(rng, name)
    y, grads = _ours(*problem)
    _assert_close((y, grads), _loop(*problem))
    assert not np.any(y[:, 0]), "a token that visits nobody gets nothing"
    assert not np.any(np.asarray(grads[1])[ids < 0])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_kernels_multiply_with_what_experts_do_not_share(platform, monkeypatch, rng):
    """Both passes, lowered without an accelerator, have no grouped products but the base's."""
    for name in WIDTHS:
        monkeypatch.setitem(WIDTHS, name, (128, 128))
    x, ids, weights, p, lora, g = _problem(rng, "shared")

    def text(lora):
        with gpu.abstract() if platform == "cuda" else contextlib.nullcontext():
            traced = jax.jit(_ours).trace(x, ids, weights, p, lora, g)
            return traced.lower(lowering_platforms=(platform,)).as_text()

    bare = AdapterView((), base_blocks=lora.total_blocks)
    mine, base = text(lora), text(bare)
    assert mine.count("ragged_dot") == base.count("ragged_dot")
    kernels = {
        "tpu": ("slot_lora_shrink", "slot_lora_expand", "packed_lora_outer"),
        "cuda": ("_slot_lora_shrink", "_slot_lora_expand", "_packed_lora_factors"),
    }
    assert all(name in mine and name not in base for name in kernels[platform])
