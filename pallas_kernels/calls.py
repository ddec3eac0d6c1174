"""Calls of the ops in the shapes of real models, to compile them or to measure them with random
arguments.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pallas_kernels import (
    dispatch,
    grouped_matmul,
    latent_attention,
    layer_matmul,
    packed_attention,
    packed_lora,
    packed_matmul,
    paged_attention,
    slot_lora,
)
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.latent_attention import shapes as latent_shapes
from pallas_kernels.layer_matmul import shapes as layer_shapes
from pallas_kernels.packed_attention import shapes as attention_shapes
from pallas_kernels.packed_lora import shapes as lora_shapes
from pallas_kernels.packed_matmul import shapes as matmul_shapes
from pallas_kernels.paged import PAGE, RUN, Rows
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.slot_lora import shapes as slot_shapes

PAGES = 4096  # pages of a pool
Spec = Callable[..., jax.ShapeDtypeStruct]


class Call(NamedTuple):
    """One call of an op."""

    op: str  # name of the op in `pallas_kernels.tuning`
    shape: Any  # shape from a model
    fn: Callable[..., Any]  # function of `args`
    args: tuple[Any, ...]  # abstract arguments
    donated: tuple[int, ...]  # indices of arguments that are updated in place
    # makes the integer arguments, owners of rows and locations, in the order of the leaves of
    # `args`
    numbers: Callable[[np.random.Generator], tuple[Any, ...]]

    @property
    def name(self) -> str:
        return f"{self.op} {tuple(self.shape)}"

    def arguments(self, rng: np.random.Generator) -> tuple[Any, ...]:
        """Returns random arguments on the default device."""
        numbers = iter(self.numbers(rng))
        keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 64))

        def one(x: jax.ShapeDtypeStruct) -> jax.Array:
            if x.dtype == jnp.int32:
                made = jnp.asarray(next(numbers), jnp.int32)
                if made.shape != x.shape:
                    raise ValueError(f"{self.name}: numbers of shape {made.shape} for {x.shape}")
                return made
            if x.dtype == jnp.int8:
                return jax.random.randint(next(keys), x.shape, -127, 128, jnp.int8)
            normal = jax.jit(lambda key: (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype))
            return normal(next(keys))

        return jax.tree.map(one, self.args)


def calls(device: Any, platform: str) -> Iterator[Call]:
    """Yields calls of the ops with a kernel for ``tpu`` or ``cuda``, on this device."""
    place = SingleDeviceSharding(device)

    def spec(*dims: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    if platform == "cuda":
        yield from _grouped(spec)
        yield from _layer_matmul(spec)
    else:
        yield from _packed_matmul(spec)
    yield from _packed_lora(spec)
    yield from _slot_lora(spec, platform)
    yield from _packed_attention(spec, platform)
    yield from _paged(spec)


def _grouped(spec: Spec) -> Iterator[Call]:
    for s in grouped_shapes.SHAPES:
        w = (s.d_out, s.d_in) if s.transposed else (s.d_in, s.d_out)
        x, matrices = spec(s.rows, s.d_in, dtype=s.dtype), spec(s.groups, *w, dtype=s.stored)
        fn = functools.partial(grouped_matmul.grouped_matmul, transposed=s.transposed)

        def numbers(rng: np.random.Generator, s: Any = s) -> tuple[Any, ...]:
            return (np.bincount(rng.integers(0, s.groups, s.rows), minlength=s.groups),)

        yield Call("grouped_matmul", s, fn, (x, matrices, spec(s.groups)), (), numbers)


def _packed_matmul(spec: Spec) -> Iterator[Call]:
    for s in matmul_shapes.SHAPES:
        of = functools.partial(spec, dtype="bfloat16")
        w, W = [of(s.experts, s.d_in, F) for F in s.d_out], s.experts * s.adapters
        a, b = [of(W, s.rank, s.d_in) for _ in s.d_out], [of(W, s.rank, F) for F in s.d_out]

        def numbers(rng: np.random.Generator, s: Any = s) -> tuple[Any, ...]:
            factor = np.sort(rng.integers(0, s.experts * s.adapters, s.rows))
            return np.bincount(factor // s.adapters, minlength=s.experts), factor

        args = of(s.rows, s.d_in), w, spec(s.experts), a, b, spec(s.rows)
        yield Call("packed_matmul", s, packed_matmul.packed_matmul, args, (), numbers)


def _packed_lora(spec: Spec) -> Iterator[Call]:
    for s in (*lora_shapes.DECODE, *lora_shapes.TRAIN):
        of, factor = functools.partial(spec, dtype=s.dtype), spec(s.rows)
        x, wide = of(s.rows, s.d_in), [of(s.rows, F) for F in s.d_out]
        a = [of(s.factors, s.rank, s.d_in) for _ in s.d_out]
        b = [of(s.factors, s.rank, F) for F in s.d_out]

        def numbers(rng: np.random.Generator, s: Any = s) -> tuple[Any, ...]:
            return (np.sort(rng.integers(0, s.factors, s.rows)),)

        for op, table, args in (
            ("packed_lora", packed_lora.ADD, (x, a, b, wide, factor)),
            ("packed_lora backward", packed_lora.BACKWARD, (x, a, b, wide, x, factor)),
        ):

            def fn(*args: Any, table: Any = table) -> Any:
                return dispatch.run("packed_lora", table, "auto", args)

            yield Call(op, s, fn, args, (len(args) - 2,), numbers)


def _layer_matmul(spec: Spec) -> Iterator[Call]:
    def fn(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        return layer_matmul.layer_matmul(x, rest[:-1], rest[-1])

    for s in layer_shapes.SHAPES:
        stacks = (spec(s.layers, s.d_in, F, dtype=s.stored) for F in s.d_outs)
        args = spec(s.rows, s.d_in, dtype="bfloat16"), *stacks, spec()
        yield Call("layer_matmul", s, fn, args, (), lambda rng, s=s: (rng.integers(s.layers),))


def _slot_lora(spec: Spec, platform: str) -> Iterator[Call]:
    """On TPUs the kernel is packed LoRA's."""
    op, form = "slot_lora", slot_lora.pallas_gpu
    if platform == "tpu":
        op, form = "packed_lora", slot_lora.pallas_tpu
    for s in (*slot_shapes.DECODE, *slot_shapes.PREFILL):
        of, (F,) = functools.partial(spec, dtype=s.dtype), s.d_out
        a, b = (of(s.factors, s.rank, n) for n in (s.d_in, F))

        def numbers(rng: np.random.Generator, s: Any = s) -> tuple[Any, ...]:
            return (rng.integers(0, s.factors, s.rows),)

        args = of(s.rows, s.d_in), a, b, of(s.rows, F), spec(s.rows)
        yield Call(op, s, form.add, args, (3,), numbers)


def _packed_attention(spec: Spec, platform: str) -> Iterator[Call]:
    kernel = packed_attention.pallas_tpu if platform == "tpu" else packed_attention.pallas_gpu

    def numbers(rng: np.random.Generator, s: Any) -> tuple[Any, ...]:
        own = np.sort(rng.integers(0, 4, (s.B, s.T)), axis=1)  # four texts a row
        position = np.broadcast_to(np.arange(s.T), own.shape)  # numbers count from anywhere
        return (own, own) if s.window is None else (own, own, position)

    for s in attention_shapes.TRAIN:
        of_k, of = (s.B, s.K), functools.partial(spec, dtype=s.dtype)
        q, out, k, v = (
            of(*of_k, *dims) for dims in ((s.G, s.T, s.H), (s.G, s.T, s.V), (s.T, s.H), (s.T, s.V))
        )
        own, lse = spec(s.B, s.T), spec(*of_k, s.G, s.T, dtype="float32")
        for op, call, more in (
            ("packed_attention", kernel.forward, ()),
            ("packed_attention backward", kernel.backward, (out, lse, out)),
        ):
            fn = functools.partial(call, scale=s.H**-0.5, window=s.window)
            args = q, k, v, own, own, None if s.window is None else own, *more
            yield Call(op, s, fn, args, (), functools.partial(numbers, s=s))


def _paged(spec: Spec) -> Iterator[Call]:
    def rows(s: Any) -> Any:
        of_rows: list[Any] = [spec(s.rows)] * 3
        table: Any = spec(s.rows, s.positions // PAGE)
        layer: Any = spec()
        return Rows(layer, table, *of_rows)

    def numbers(rng: np.random.Generator, s: Any) -> tuple[Any, ...]:
        """Returns half a table of prefix, followed by the rows' own tokens, up to a quarter."""
        prefix = np.full(s.rows, s.positions // 2 // RUN * RUN)
        own = rng.integers(1, s.positions // 4, s.rows)
        table = rng.integers(0, PAGES, (s.rows, s.positions // PAGE))
        return 0, table, prefix, own, np.zeros(s.rows)

    for s in (*paged_shapes.DECODE, *paged_shapes.TEAMS, *paged_shapes.PREFILL):
        of, call = functools.partial(spec, dtype=s.dtype), paged_attention.paged_attention
        pool = of(2, PAGES, s.heads, PAGE, s.width)
        args = of(s.rows, s.heads, s.queries, s.head_dim), pool, pool, rows(s)
        fn = functools.partial(call, scale=s.head_dim**-0.5)
        yield Call("paged_attention", s, fn, args, (), functools.partial(numbers, s=s))
    for s in (*latent_shapes.DECODE, *latent_shapes.TEAMS, *latent_shapes.PREFILL):
        of, call = functools.partial(spec, dtype=s.dtype), latent_attention.latent_attention
        queries = (of(s.rows, s.queries, n) for n in (s.latent, s.rope))
        pools = (of(2, PAGES, PAGE, n) for n in (s.latent, s.width))
        fn = functools.partial(call, scale=s.latent**-0.5)
        args = *queries, *pools, rows(s)
        yield Call("latent_attention", s, fn, args, (), functools.partial(numbers, s=s))
