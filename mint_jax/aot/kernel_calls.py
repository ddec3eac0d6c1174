"""Calls of the ops of ``pallas_kernels`` in the shapes of real models, to compile them or to
measure them with random arguments.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mint_jax.models import attention
from pallas_kernels import (
    dispatch,
    grouped_matmul,
    latent_attention,
    layer_matmul,
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

# A call's integer arguments, in the order of its arguments' leaves.
Numbers = Callable[[np.random.Generator], tuple[Any, ...]]


class Call(NamedTuple):
    """One call of an op.

    Attributes:
        op: name of the op in ``pallas_kernels.tuning``.
        shape: shape from a model.
        fn: function of ``args``.
        args: abstract arguments.
        donated: indices of arguments that are updated in place.
        numbers: makes the integer arguments: owners of rows, and locations.
    """

    op: str
    shape: Any
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    numbers: Numbers

    @property
    def name(self) -> str:
        """Op and shape."""
        return f"{self.op} {tuple(self.shape)}"

    def arguments(self, rng: np.random.Generator) -> tuple[Any, ...]:
        """Returns random arguments on the default device."""
        numbers, keys = (
            iter(self.numbers(rng)),
            iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 64)),
        )

        def one(x: jax.ShapeDtypeStruct) -> jax.Array:
            if x.dtype == jnp.int32:
                made = jnp.asarray(next(numbers), jnp.int32)
                if made.shape != x.shape:
                    raise ValueError(f"{self.name}: numbers of shape {made.shape} for {x.shape}")
                return made
            if x.dtype == jnp.int8:
                return jax.random.randint(next(keys), x.shape, -127, 128, jnp.int8)
            return jax.jit(lambda key: (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype))(
                next(keys)
            )

        return jax.tree.map(one, self.args)


def calls(device: Any, platform: str) -> Iterator[Call]:
    """Yields calls of the ops with a kernel for this platform, ``tpu`` or ``cuda``, on this
    device.
    """
    place = SingleDeviceSharding(device)

    def spec(*dims: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    yield from _grouped(spec) if platform == "cuda" else _packed_matmul(spec)
    yield from _packed_lora(spec)
    yield from _slot_lora(spec, platform)
    if platform == "cuda":
        yield from _layer_matmul(spec)
    yield from _packed_attention(spec)
    yield from _paged(spec)


Spec = Callable[..., jax.ShapeDtypeStruct]


def _rows_of_groups(rng: np.random.Generator, rows: int, groups: int) -> np.ndarray:
    return np.bincount(rng.integers(0, groups, rows), minlength=groups)


def _grouped(spec: Spec) -> Iterator[Call]:
    for s in grouped_shapes.SHAPES:
        w = (s.d_out, s.d_in) if s.transposed else (s.d_in, s.d_out)
        args = (
            spec(s.rows, s.d_in, dtype=s.dtype),
            spec(s.groups, *w, dtype=s.stored),
            spec(s.groups, dtype="int32"),
        )
        fn = functools.partial(grouped_matmul.grouped_matmul, transposed=s.transposed)
        yield Call(
            "grouped_matmul",
            s,
            fn,
            args,
            (),
            lambda rng, s=s: (_rows_of_groups(rng, s.rows, s.groups),),
        )


def _packed_matmul(spec: Spec) -> Iterator[Call]:
    def numbers(rng: np.random.Generator, s: matmul_shapes.Shape) -> tuple[Any, ...]:
        factor = np.sort(rng.integers(0, s.experts * s.adapters, s.rows))
        return np.bincount(factor // s.adapters, minlength=s.experts), factor

    for s in matmul_shapes.SHAPES:
        of = functools.partial(spec, dtype="bfloat16")
        w, W = [of(s.experts, s.d_in, F) for F in s.d_out], s.experts * s.adapters
        a, b = [of(W, s.rank, s.d_in) for _ in s.d_out], [of(W, s.rank, F) for F in s.d_out]
        args = (
            of(s.rows, s.d_in),
            w,
            spec(s.experts, dtype="int32"),
            a,
            b,
            spec(s.rows, dtype="int32"),
        )
        yield Call(
            "packed_matmul",
            s,
            packed_matmul.packed_matmul,
            args,
            (),
            functools.partial(numbers, s=s),
        )


def _packed_lora(spec: Spec) -> Iterator[Call]:
    for s in (*lora_shapes.DECODE, *lora_shapes.TRAIN):
        x, factor = spec(s.rows, s.d_in, dtype=s.dtype), spec(s.rows, dtype="int32")
        a = [spec(s.factors, s.rank, s.d_in, dtype=s.dtype) for _ in s.d_out]
        b = [spec(s.factors, s.rank, F, dtype=s.dtype) for F in s.d_out]
        wide = [spec(s.rows, F, dtype=s.dtype) for F in s.d_out]
        for op, table, args, onto in (
            ("packed_lora", packed_lora.ADD, (x, a, b, wide, factor), 3),
            ("packed_lora backward", packed_lora.BACKWARD, (x, a, b, wide, x, factor), 4),
        ):
            fn = lambda *args, table=table: dispatch.run("packed_lora", table, "auto", args)  # noqa: E731
            yield Call(
                op,
                s,
                fn,
                args,
                (onto,),
                lambda rng, s=s: (np.sort(rng.integers(0, s.factors, s.rows)),),
            )


def _layer_matmul(spec: Spec) -> Iterator[Call]:
    for s in layer_shapes.SHAPES:
        x = spec(s.rows, s.d_in, dtype="bfloat16")
        stacks = tuple(spec(s.layers, s.d_in, d_out, dtype=s.stored) for d_out in s.d_outs)

        def fn(x: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
            return layer_matmul.layer_matmul(x, rest[:-1], rest[-1])

        yield Call(
            "layer_matmul",
            s,
            fn,
            (x, *stacks, spec(dtype="int32")),
            (),
            lambda rng, s=s: (rng.integers(s.layers),),
        )


def _slot_lora(spec: Spec, platform: str) -> Iterator[Call]:
    """On TPUs the kernel is packed LoRA's."""

    def numbers(rng: np.random.Generator, s: lora_shapes.Shape) -> tuple[Any, ...]:
        return (rng.integers(0, s.factors, s.rows),)

    for s in (*slot_shapes.DECODE, *slot_shapes.PREFILL):
        x, onto, (F,) = (
            spec(s.rows, s.d_in, dtype=s.dtype),
            spec(s.rows, *s.d_out, dtype=s.dtype),
            s.d_out,
        )
        a, b = (spec(s.factors, s.rank, n, dtype=s.dtype) for n in (s.d_in, F))
        factor, of = spec(s.rows, dtype="int32"), functools.partial(numbers, s=s)
        op, form = (
            ("packed_lora", slot_lora.pallas_tpu)
            if platform == "tpu"
            else ("slot_lora", slot_lora.pallas_gpu)
        )
        yield Call(op, s, form.add, (x, a, b, onto, factor), (3,), of)


def _packed_attention(spec: Spec) -> Iterator[Call]:
    def numbers(rng: np.random.Generator, s: attention_shapes.Shape) -> tuple[Any, ...]:
        own = np.sort(rng.integers(0, 4, (s.B, s.T)), axis=1)  # four texts a row
        return own, own

    for s in attention_shapes.TRAIN:
        of_k, scale = (s.B, s.K), s.H**-0.5
        q, out, k, v = (
            spec(*of_k, *dims, dtype=s.dtype)
            for dims in ((s.G, s.T, s.H), (s.G, s.T, s.V), (s.T, s.H), (s.T, s.V))
        )
        own, lse = spec(s.B, s.T, dtype="int32"), spec(*of_k, s.G, s.T, dtype="float32")
        for op, table, args in (
            ("packed_attention", attention.FORWARD, (q, k, v, own, own, None)),
            (
                "packed_attention backward",
                attention.BACKWARD,
                (q, k, v, own, own, None, out, lse, out),
            ),
        ):
            fn = lambda *args, op=op, table=table, scale=scale: dispatch.run(  # noqa: E731
                op, table, "auto", args, scale=scale
            )
            yield Call(op, s, fn, args, (), functools.partial(numbers, s=s))


def _paged(spec: Spec) -> Iterator[Call]:
    def rows(s: Any) -> Rows:
        numbers: list[Any] = [spec(s.rows, dtype="int32")] * 3
        layer: Any = spec(dtype="int32")
        table: Any = spec(s.rows, s.positions // PAGE, dtype="int32")
        return Rows(layer, table, *numbers)

    def numbers(rng: np.random.Generator, s: Any) -> tuple[Any, ...]:
        """Returns half a table of prefix, followed by the rows' own tokens, up to a quarter."""
        prefix, own = (
            np.full(s.rows, s.positions // 2 // RUN * RUN),
            rng.integers(1, s.positions // 4, s.rows),
        )
        return (
            0,
            rng.integers(0, PAGES, (s.rows, s.positions // PAGE)),
            prefix,
            own,
            np.zeros(s.rows),
        )

    for s in (*paged_shapes.DECODE, *paged_shapes.TEAMS, *paged_shapes.PREFILL):
        pool = spec(2, PAGES, s.heads, PAGE, s.width, dtype=s.dtype)
        args = spec(s.rows, s.heads, s.queries, s.head_dim, dtype=s.dtype), pool, pool, rows(s)
        fn = functools.partial(paged_attention.paged_attention, scale=s.head_dim**-0.5)
        yield Call("paged_attention", s, fn, args, (), functools.partial(numbers, s=s))
    for s in (*latent_shapes.DECODE, *latent_shapes.TEAMS, *latent_shapes.PREFILL):
        queries = (spec(s.rows, s.queries, n, dtype=s.dtype) for n in (s.latent, s.rope))
        pools = (spec(2, PAGES, PAGE, n, dtype=s.dtype) for n in (s.latent, s.width))
        fn = functools.partial(latent_attention.latent_attention, scale=s.latent**-0.5)
        yield Call(
            "latent_attention",
            s,
            fn,
            (*queries, *pools, rows(s)),
            (),
            functools.partial(numbers, s=s),
        )
