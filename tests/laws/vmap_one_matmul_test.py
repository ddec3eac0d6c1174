"""Law 2: a function of one policy under ``vmap`` makes one base matmul over all rows, in the jaxpr
and in the compiled program.

Every dimension of the tiny base, the rows and the ranks differ, so that a shape says what an array
is.
"""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import params as params_lib
from mint_jax.aot import hlo
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.packed_lora import tile_rows
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.samples import longest_table
from mint_jax.train import state as state_lib
from mint_jax.train import step
from mint_jax.train.batch import Batch
from mint_jax.train.losses import LossCoefs, Targets
from tests.views import view_of_one

P, B, T, M = 5, 2, 11, 7  # policies, rows of each, tokens of a row, targets of a row
RANKS = (1, 3, 4, 6, 7)  # buckets 1, 4, 4, 8, 8


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def matrices(cfg) -> dict[frozenset[int], int]:
    """{in, out} of the projections of a layer -> how many have these dimensions."""
    q, kv = (n * cfg.head_dim for n in (cfg.num_heads, cfg.num_kv_heads))
    return {frozenset((cfg.d_model, n)): count for n, count in ((q, 2), (kv, 2), (cfg.d_ff, 3))}


def base_matmuls_of_hlo(text: str, cfg) -> list[tuple[frozenset[int], int]]:
    """({in, out} of the base operand, rows of the result) of every product with a base matrix;
    custom calls count as products.

    The kernel of CPUs is given whole stacks of layers, of each of which it multiplies one.
    """
    products = []
    for of, result, rest in hlo_products(text):
        if "mint_layer_matmul" in rest:
            x, _layer, _rows_in_use, *stacks = of
            products += [
                ([x, stack[-2:]], (x[0], stack[-1] if stack[-2] == x[1] else stack[-2]))
                for stack in stacks
            ]
        else:
            products.append((of, result))
    return base_matmuls(products, cfg)


def hlo_products(text: str):
    """Yields shapes of operands, shape of the result and attributes of products and calls."""
    module = hlo.Module(text)
    for i in (i for body in module.computations.values() for i in body):
        if i.op in ("dot", "convolution", "custom-call"):
            operands = [hlo.shape(module.types.get(name, "")) for name in i.operands]
            yield operands, hlo.shape(i.type), i.rest


def base_matmuls_of_jaxpr(jaxpr, cfg) -> list[tuple[frozenset[int], int]]:
    found = [e for e in equations(jaxpr) if is_matmul(e)]
    products = [([x.aval.shape for x in e.invars], e.outvars[0].aval.shape) for e in found]
    return base_matmuls(products, cfg)


def is_matmul(equation) -> bool:
    return equation.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")


def base_matmuls(products, cfg) -> list[tuple[frozenset[int], int]]:
    """Of (operand shapes, result shape), those where an operand is one base matrix; a stack of
    copies is none.
    """
    known = {*matrices(cfg), frozenset((cfg.vocab_size, cfg.d_model))}
    out = []
    for operands, result in products:
        for shape in operands:
            if frozenset(shape[-2:]) in known and math.prod(shape[:-2]) == 1:
                width = next(n for n in reversed(result) if n in shape[-2:])
                out.append((frozenset(shape[-2:]), math.prod(result) // width))
    return out


def equations(jaxpr):
    """All equations, those of inner jaxprs too."""

    def is_jaxpr(x) -> bool:
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def check(fn, args, cfg, rows: int, passes: int, unembed: Counter) -> None:
    """Each projection is one product over all ``rows`` a pass; ``unembed`` counts the rows of
    products with the unembedding.
    """
    expected = Counter({(dims, rows): count * passes for dims, count in matrices(cfg).items()})
    table = frozenset((cfg.vocab_size, cfg.d_model))
    expected += Counter({(table, n): count for n, count in unembed.items()})
    traced = fn.trace(*args)
    assert Counter(base_matmuls_of_jaxpr(traced.jaxpr.jaxpr, cfg)) == expected
    text = traced.lower().compile().as_text()
    assert Counter(base_matmuls_of_hlo(text, cfg)) == expected
    # no base matrix once for each policy, wherever the axis is
    for dims in set(re.findall(r"\w+\[([\d,]+)\]", text)):
        shape = tuple(map(int, dims.split(",")))
        for matrix in (*matrices(cfg), table):
            assert not (matrix <= set(shape) and math.prod(shape) >= P * math.prod(matrix)), (
                f"[{dims}] is a base matrix for every policy"
            )


def hidden(params, adapter, tokens_BT, cfg):
    """A function of one policy."""
    positions_BT = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
    inputs = transformer.DecoderInputs(tokens_BT, positions_BT)
    return transformer.hidden_states(params, view_of_one(adapter), inputs, cfg)[0]


def test_vmap_of_one_policy_is_one_base_matmul(tiny_base):
    cfg = tiny_base("llama").cfg
    specs = transformer.abstract(cfg)

    def f(params, adapter, tokens_BT):
        return hidden(params, adapter, tokens_BT, cfg)

    one = lora_tree.adapter_specs(specs, AdapterConfig(4))
    adapters = jax.tree.map(lambda s: struct(s.dtype, P, *s.shape), one)
    args = params_lib.abstract(specs), adapters, struct(jnp.int32, P, B, T)
    many = jax.jit(jax.vmap(f, in_axes=(None, 0, 0)))
    check(many, args, cfg, rows=P * B * T, passes=1, unembed=Counter())
    deltas = [
        e.outvars[0].aval.shape
        for e in equations(many.trace(*args).jaxpr.jaxpr)
        if is_matmul(e) and 4 in e.outvars[0].aval.shape
    ]
    assert len(deltas) == 7, "one product with A for all policies, a projection"
    assert all(math.prod(shape) == P * B * T * 4 for shape in deltas)


def training_batch(policies: int, rows: int, tokens: int, targets: int) -> tuple[Batch, LossCoefs]:
    """Shapes of a batch and of the policies' coefficients."""
    ints, floats = (struct(x, policies, rows, targets) for x in (jnp.int32, jnp.float32))
    read = struct(jnp.int32, policies, rows, tokens)
    loss = Targets(floats, floats, floats, floats, ints, struct(jnp.float32, policies, 0))
    kinds = {"kind": jnp.int32, "kl_kind": jnp.int32}
    coefs = (struct(kinds.get(name, jnp.float32), policies) for name in LossCoefs._fields)
    return Batch(read, read, read, read, ints, ints, loss), LossCoefs(*coefs)


def training_args(cfg):
    """Shapes of the arguments of ``step.forward_backward``."""
    specs = transformer.abstract(cfg)
    state = jax.eval_shape(lambda: state_lib.empty(specs, [AdapterConfig(r) for r in RANKS]))
    slots = {1: struct(jnp.int32, 1), 4: struct(jnp.int32, 2), 8: struct(jnp.int32, 2)}
    return params_lib.abstract(specs), state, *training_batch(P, B, T, M), slots


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_step_is_one_base_matmul_forward_and_one_backward(family, tiny_base):
    """Norms of queries and keys, as Qwen3 has them, have no projection computed again."""
    cfg = tiny_base(family).cfg
    fn = jax.jit(lambda *args: step.forward_backward(*args, cfg=cfg, remat="names"))
    # the forward pass of the unembedding also makes its gradient: logits, and the mean row under
    # them
    check(fn, training_args(cfg), cfg, rows=P * B * T, passes=2, unembed=Counter({P * B * M: 2}))


def check_experts(fn, args, cfg) -> None:
    """Every projection of the experts meets the rows of all policies at once."""
    E, D, F = cfg.experts.count, cfg.d_model, cfg.experts.width
    rows = P * B * T * cfg.experts.per_token
    # Into F: gate and up forward, down backward; into D: down forward, gate and up backward.
    passes = 3
    traced = fn.trace(*args)
    grouped = Counter()
    # the form of accelerators; that of the CPU stands beside it
    for e in equations(traced.jaxpr.jaxpr):
        if e.primitive.name == "ragged_dot_general" and set(e.invars[1].aval.shape) == {E, D, F}:
            grouped[e.invars[0].aval.shape] += 1
    assert grouped == {(rows, D): passes, (rows, F): passes}
    text = traced.lower().compile().as_text()
    # on CPU a loop over tiles, each a product with one expert's matrix
    products = list(hlo_products(text))
    tiles = Counter(y for xs, y, _ in products if any({D, F} == set(x) - {1} for x in xs))
    tile = tile_rows(rows, E)
    assert tiles == {(tile, F): passes, (tile, D): passes}
    for dims in set(re.findall(r"\w+\[([\d,]+)\]", text)):
        shape = tuple(map(int, dims.split(",")))
        assert not ({D, F} <= set(shape) and math.prod(shape) >= P * E * D * F), (
            f"[{dims}] is the experts for every policy"
        )


def test_training_step_is_one_grouped_matmul_of_the_experts_forward_and_one_backward(tiny_base):
    cfg = tiny_base("qwen3_moe").cfg
    fn = jax.jit(lambda *args: step.forward_backward(*args, cfg=cfg, remat="none"))
    check_experts(fn, training_args(cfg), cfg)


@pytest.mark.long
def test_vmap_of_one_policy_equals_each_alone(tiny_base, rng):
    """Of a dense model: JAX has no rule for the grouped product of routed experts, whose policies
    are blocks of rows.
    """
    base = tiny_base("llama")
    cfg, policies = base.cfg, 3
    one = lora_tree.adapter_specs(transformer.abstract(cfg), AdapterConfig(2))
    adapters = jax.tree.map(
        lambda s: jnp.asarray(rng.normal(0, 0.3, (policies, *s.shape)), s.dtype), one
    )
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (policies, B, T)), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(B, T, cfg.d_model)), jnp.float32)

    def loss(params, adapter, tokens_BT):
        return jnp.sum(hidden(params, adapter, tokens_BT, cfg) * weight)

    gradient = jax.value_and_grad(loss, 1)
    got = jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0)))(base.params, adapters, tokens)
    single = jax.jit(gradient)
    own = [jax.tree.map(lambda x, p=p: x[p], adapters) for p in range(policies)]
    alone = [single(base.params, one, tokens[p]) for p, one in enumerate(own)]
    want = jax.tree.map(lambda *x: np.stack(x), *alone)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # float32 sums in another order; relative to the largest entry
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(want[1]))


@pytest.mark.parametrize("kernel", ["cpu", "xla"])
def test_sampling_is_one_base_matmul_a_token(tiny_base, kernel):
    """Rows of any adapters: which there are is data, so that this is so for every mixture."""
    cfg = tiny_base("llama").cfg
    chosen = "auto" if kernel == "cpu" else kernel
    # two heads of 16 would be as wide as a page is long
    cfg = cfg.replace(kernels=dataclasses.replace(cfg.kernels, layer_matmul=chosen), head_dim=18)
    rows, blocks, table = 10, 6, longest_table(64)
    specs = transformer.abstract(cfg)
    made = lambda b, n: lora_tree.empty_stack(specs, lora_tree.LINEAR_TARGETS, b, n)  # noqa: E731
    stacks = jax.eval_shape(lambda: {b: made(b, n) for b, n in ((1, 1), (4, 2), (8, 2))})
    args = params_lib.abstract(specs), stacks, device.pool_specs(cfg, 64, jnp.float32, routes=False)
    prefill = jax.jit(lambda *args: device.prefill(*args, cfg=cfg))
    reading = plans.blocks_plan([[]], blocks, table, stacks)
    # a prompt's last token is decoding's
    check(prefill, (*args, reading), cfg, rows=blocks * PAGE, passes=1, unembed=Counter())
    decode = jax.jit(lambda *args: device.decode(*args, cfg=cfg))
    drawing, _ = plans.rows_plan([], rows, 1, table, cfg.vocab_size, stacks)
    args = (*args, drawing, struct(jnp.int32))
    check(decode, args, cfg, rows=rows, passes=1, unembed=Counter({rows: 1}))
    text = decode.lower(*args).compile().as_text()
    # the three of attention's inputs, its output, the MLP's two, its output; and the unembedding
    assert text.count('custom_call_target="mint_layer_matmul"') == (5 if kernel == "cpu" else 0)
