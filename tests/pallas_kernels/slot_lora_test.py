"""Slot LoRA against float64: rows in any order, whole and in parts; isolation, races, a mesh, and
what TPUs' compilers make of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.lora import slot_kernel
from mint_jax.lora.slot_kernel import Products
from mint_jax.lora.tree import AdapterStack
from mint_jax.lora.view import add_deltas, attach_rows
from mint_jax.mesh import make_mesh, single_device_mesh
from pallas_kernels import slot_lora
from pallas_kernels.packed_lora.pallas_tpu import Config
from pallas_kernels.slot_lora import reference
from tests.marks import first
from tests.pallas_kernels import gpu
from tests.pallas_kernels.packed_lora_test import close


def arguments(rng, M, D, F, R, W, dtype):
    """x, a, b, onto, slot, scale; rows in any order, some of none."""

    def normal(*shape, scale=1.0):
        return jnp.array(scale * rng.normal(size=shape), dtype)

    slot = jnp.array(rng.integers(-1, W, M), jnp.int32)
    scale = jnp.array(rng.uniform(0.5, 2, M), jnp.float32)
    a, b = normal(W, R, D, scale=D**-0.5), normal(W, R, F, scale=R**-0.5)
    return normal(M, D), a, b, normal(M, F), slot, scale


def in_parts(shrink, expand, x, a, b, onto, slot, scale):
    """As two devices would that have half of the inputs each."""
    halves = np.split(np.arange(x.shape[1]), 2)
    inner = sum(shrink(x[:, at], a[:, :, at], slot) for at in halves)
    return expand(inner * scale[:, None], b, onto, slot)


def interpreted(kernels, **sizes):
    """The sum whole, and in parts."""
    add, *parts = (
        jax.jit(functools.partial(f, **sizes, interpret=True))
        for f in (kernels.add, kernels.shrink, kernels.expand)
    )
    return add, functools.partial(in_parts, *parts)


GPU = slot_lora.pallas_gpu
on_tpu = interpreted(slot_lora.pallas_tpu, config=Config(rows=32, columns=128))
on_gpu = interpreted(GPU, how=GPU.Config(depth=64, parts=3, columns=32, warps=4))
FORMS = dict(zip(("whole", "in parts", "gpu", "in parts, gpu"), (*on_tpu, *on_gpu)))
FORMS["cpu"] = jax.jit(slot_lora.cpu.add)
CASES = [
    (70, 256, 384, 16, 90, "float32"),  # more slots than rows, several chunks of a tile
    (8, 256, 128, 4, 20, "bfloat16"),
    (33, 256, 128, 1, 5, "float32"),
    (40, 256, 128, 64, 3, "bfloat16"),
    (20, 256, 128, 256, 4, "float32"),
    (70, 256, 128, 24, 30, "bfloat16"),
]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("case", first(2, CASES), ids=str)
def test_values_are_those_of_float64(rng, form, case):
    if form is FORMS["cpu"]:  # of float32 alone, and of any widths
        M, D, F, *of, _ = case
        case = (M, D + int(rng.integers(20)), F + int(rng.integers(20)), *of, "float32")
    x, a, b, onto, slot, scale = arguments(rng, *case)
    close(form(x, a, b, onto, slot, scale), reference.add(x, a, b, onto, slot, scale), case[-1])
    nobody = jnp.full_like(slot, -1)
    assert np.array(form(x, a, b, onto, nobody, scale)).tobytes() == np.array(onto).tobytes()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_not_finite_stays_with_its_slot(rng, form):
    x, a, b, onto, _, scale = arguments(rng, 64, 256, 256, 16, 12, "float32")
    # in two tiles, side by side in two chunks
    slot = jnp.array(rng.permutation(np.repeat(np.arange(12), 6))[:64], jnp.int32)
    clean = np.array(form(x, a, b, onto, slot, scale))
    bad = int(slot[rng.integers(64)])
    mine = np.array(slot) == bad
    row = int(np.flatnonzero(mine)[0])
    for value in (np.nan, np.inf, -np.inf):
        for where in ("a", "b", "x"):
            args = {"x": x, "a": a, "b": b}
            at = (row,) if where == "x" else (bad, int(rng.integers(16)))
            args[where] = args[where].at[(*at, int(rng.integers(256)))].set(value)
            made = np.array(form(args["x"], args["a"], args["b"], onto, slot, scale))
            others = np.arange(64) != row if where == "x" else ~mine
            assert made[others].tobytes() == clean[others].tobytes(), (where, value)
            assert not np.isfinite(made[~others]).all(), "and it is told"


L, S = 2, 6


def stack_of(rng, D, F, R):
    a, b = (rng.normal(size=(L, S, R, n)).astype(np.float32) * n**-0.5 for n in (D, F))
    return AdapterStack({"q": {"a": a, "b": b}}, rng.uniform(0.5, 3, S).astype(np.float32), R)


MESHES = None, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "expert": 2}, {"fsdp": 8}


@pytest.mark.parametrize("B", first(1, [8, 3]))
@pytest.mark.parametrize("sizes", first(2, MESHES), ids=str)
@pytest.mark.parametrize("ends", [("embed", "q_heads"), ("q_heads", "embed")], ids=str)
@pytest.mark.parametrize("kernel", ["pallas_tpu", "pallas_gpu"])
def test_over_a_mesh_the_kernel_gives_what_xla_gives(rng, sizes, ends, kernel, B):
    """Columns split, inputs split, rows and one of these by the same axis, rows that no axis
    divides; two ranks; and where an adapter is NaN the others' rows have the bits that they had.
    """
    D, F, T = 1024, 2048, 3
    stacks = {R: stack_of(rng, D, F, R) for R in (4, 16)}
    slots = {
        4: np.array([0, -1, 5, -1, 0, -1, 2, -1], np.int32)[:B],
        16: np.array([-1, 3, -1, 1, -1, -1, -1, 3], np.int32)[:B],
    }
    x, y = (np.float32(rng.normal(size=(B, T, n))) for n in (D, F))

    @functools.partial(jax.jit, static_argnames="kernel")
    def run(stacks, slots, x, y, kernel):
        lora = attach_rows(stacks, slots, kernel)
        assert lora is not None
        return add_deltas(x, [y], [lora.in_layer(jnp.int32(1)).at("q")], [ends])[0]

    want = y.astype(np.float64)
    for R, stack in stacks.items():
        for row, s in enumerate(slots[R]):
            if s >= 0:
                a, b = (stack.factors["q"][n][1, s].astype(np.float64) for n in "ab")
                want[row] += stack.scale[s] * (x[row] @ a.T) @ b
    for factor in stacks[16].factors["q"].values():
        factor[1, 4] = np.nan  # nobody's
    with jax.set_mesh(make_mesh(sizes) if sizes else single_device_mesh()):
        made = np.asarray(run(stacks, slots, x, y, kernel))
        stacks[4].factors["q"]["b"][1, 5] = np.nan
        stacks[16].factors["q"]["a"][1, 1] = np.inf
        spoilt = np.asarray(run(stacks, slots, x, y, kernel))
    # float32 sums of 1,024 terms, of size up to 10
    np.testing.assert_allclose(made, want, atol=1e-4, rtol=0)
    theirs = (slots[4] == 5) | (slots[16] == 1)
    np.testing.assert_array_equal(spoilt[~theirs], made[~theirs])
    assert np.isnan(spoilt[slots[4] == 5]).all()
    assert not np.isfinite(spoilt[slots[16] == 1]).any()


def test_a_gpu_sums_parts_of_products_as_it_adds_to_them(rng):
    """With the bits of products that were summed before; rows of none, and unused slots with NaN
    are among them, and a second rank follows.
    """
    D, widths, layer, B = 512, (384, 128), jnp.int32(1), 40
    stacks = {4: stack_of(rng, 8, 8, 4), 16: stack_of(rng, 8, 8, 16)}
    for stack in stacks.values():
        for i, F in enumerate(widths):
            a, b = (rng.normal(size=(L, S, stack.rank, n)) * n**-0.5 for n in (D, F))
            b[:, 4] = np.nan  # nobody's
            stack.factors[f"p{i}"] = {n: jnp.array(x, jnp.bfloat16) for n, x in zip("ab", (a, b))}
        del stack.factors["q"]
    slots = {R: rng.choice([-1, 0, 1, 2, 3, 5], B).astype(np.int32) for R in stacks}
    x = jnp.array(rng.normal(size=(B, 1, D)), jnp.bfloat16)
    ws = tuple(jnp.array(rng.normal(size=(L, D, F)) * D**-0.5, jnp.bfloat16) for F in widths)

    @functools.partial(jax.jit, static_argnames="fused")
    def run(x, ws, stacks, slots, fused):
        products = Products(ws, layer, "pallas_gpu", None)
        lora = attach_rows(stacks, slots, "pallas_gpu").in_layer(layer)
        loras = [lora.at(f"p{i}") for i in range(len(ws))]
        assert slot_kernel.add_to_products(
            x, products, tuple(one.buckets[0] for one in loras), layer, "pallas_gpu"
        )
        ys = products if fused else [y.astype(x.dtype) for y in products.of(x)]
        return add_deltas(x, ys, loras, [(None, None)] * 2)

    with jax.set_mesh(single_device_mesh()):
        made, apart = (run(x, ws, stacks, slots, fused) for fused in (True, False))
    for i, (y, other, w) in enumerate(zip(made, apart, ws)):
        assert np.array(y).tobytes() == np.array(other).tobytes()
        x64 = np.float64(x[:, 0])
        want = x64 @ np.float64(w[1])
        for R, stack in stacks.items():
            for row in np.flatnonzero(slots[R] >= 0):
                s = slots[R][row]
                a, b = (np.float64(stack.factors[f"p{i}"][n][1, s]) for n in "ab")
                want[row] += stack.scale[s] * (x64[row] @ a.T) @ b
        # bfloat16: three roundings of results up to 8 in size, half of 2^-5 each
        np.testing.assert_allclose(np.float64(y[:, 0]), want, atol=0.06, rtol=0)


def test_rows_are_put_in_turn_before_the_layers(rng):
    """For a GPU the sort is made with the names; what a layer does has none."""
    stacks, slots = {4: stack_of(rng, 128, 128, 4)}, {4: np.int32([2, -1, 0, 2])}

    def layer(x, y, stacks, slots, ahead):
        lora = attach_rows(stacks, slots, *["auto"] * ahead, tokens=2)
        assert (lora.buckets[0].turn is None) == (not ahead)
        of = dataclasses.replace(lora, kernel="auto").in_layer(jnp.int32(1)).at("q")
        return add_deltas(x, [y, y], [of, of], [(None, None)] * 2)

    x = y = jnp.ones((4, 2, 128))
    for ahead in (False, True):
        text = gpu.text(functools.partial(layer, ahead=ahead), x, y, stacks, slots)
        assert text.count(gpu.KERNEL) == 2
        assert text.count("stablehlo.sort") == 1
    made = [np.array(layer(x, y, stacks, slots, ahead)) for ahead in (False, True)]
    assert made[0].tobytes() == made[1].tobytes()
