"""Programs are lowered and exported where no chip is attached and no topology is named: every
kernel of TPUs, and what ``auto`` allows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import export

from pallas_kernels import packed_attention, paged_attention, slot_lora
from pallas_kernels.latent_attention import pallas as latent_attention
from pallas_kernels.packed_lora import pallas_tpu as packed_lora
from pallas_kernels.packed_matmul import pallas_tpu as packed_matmul
from pallas_kernels.paged import pallas_tpu as paged_tpu
from tests.pallas_kernels import gpu, pages


class Case(NamedTuple):
    """A call, its arguments' shapes, and how many kernels it is."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kernels: int


def cases(dtype: str, M: int) -> Iterator[Case]:
    """Each kernel, with as many rows (tokens, queries)."""

    def spec(*dims, dtype=dtype):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    D, F, R, W = 256, 384, 16, 12
    x, rows, scale = spec(M, D), spec(M, dtype="int32"), spec(M, dtype="float32")
    a, b, onto = [spec(W, R, D)] * 2, [spec(W, R, F)] * 2, [spec(M, F)] * 2
    yield Case("packed_lora", packed_lora.add, (x, a, b, onto, rows, scale), 1)
    yield Case("packed_lora backward", packed_lora.backward, (x, a, b, onto, x, rows), 1)
    w, sizes = [spec(4, D, F)] * 2, spec(4, dtype="int32")
    yield Case("packed_matmul", packed_matmul.matmul, (x, w, sizes, a, b, rows, scale), 1)
    thin = [spec(W, 1, D)] * 2, [spec(W, 1, F)] * 2
    yield Case("packed_lora of rank 1", packed_lora.add, (x, *thin, onto, rows, scale), 1)
    yield Case(
        "slot_lora",
        slot_lora.pallas_tpu.add,
        (x, a[0], b[0], onto[0], rows, scale, spec(dtype="int32")),
        1,
    )
    yield Case("slot_lora shrink", slot_lora.pallas_tpu.shrink, (x, a[0], rows), 1)
    yield Case(
        "slot_lora expand",
        slot_lora.pallas_tpu.expand,
        (spec(M, R, dtype="float32"), b[0], onto[0], rows),
        1,
    )

    q, k, own, numbers = (
        spec(2, 2, 3, M, 64),
        spec(2, 2, M, 64),
        spec(2, M, dtype="int32"),
        spec(2, 2, 3, M, dtype="float32"),
    )
    kernel = packed_attention.pallas_tpu
    yield Case(
        "packed_attention", functools.partial(kernel.forward, scale=0.1), (q, k, k, own, own), 1
    )
    yield Case(
        "packed_attention backward",
        functools.partial(kernel.backward, scale=0.1),
        (q, k, k, own, own, q, numbers, q),
        2,
    )
    pool = spec(2, 40, 2, pages.PAGE, 128)
    args = spec(4, 2, M, 64), pool, pool, pages.of_rows(4, 512)
    yield Case(
        "paged_attention",
        functools.partial(paged_attention.pallas.attend, paged_tpu, scale=0.1),
        args,
        1,
    )
    latent, rope = (spec(2, 40, pages.PAGE, n) for n in (256, 128))
    args = spec(4, M, 256), spec(4, M, 64), latent, rope, pages.of_rows(4, 512)
    yield Case(
        "latent_attention",
        functools.partial(latent_attention.attend, paged_tpu, scale=0.1),
        args,
        1,
    )


@pytest.mark.parametrize(
    "case",
    [one for dtype, M in (("bfloat16", 300), ("float32", 17)) for one in cases(dtype, M)],
    ids=lambda one: f"{one.name} {one.args[0].dtype}",
)
def test_every_kernel_of_tpus_is_lowered_without_one(case):
    text = jax.jit(case.fn).trace(*case.args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == case.kernels


def test_a_program_is_exported_for_one_platform_with_its_kernel_or_for_several_without():
    """JAX lowers every branch of ``platform_dependent`` for all platforms of a program: when it no
    longer does, docs/kernels.md changes.
    """
    pool = jax.ShapeDtypeStruct((2, 40, 2, pages.PAGE, 128), jnp.bfloat16)
    args = jax.ShapeDtypeStruct((4, 2, 3, 64), jnp.bfloat16), pool, pool, pages.of_rows(4, 512)

    def exported(implementation: str, *platforms: str) -> str:
        call = jax.jit(
            functools.partial(
                paged_attention.paged_attention, scale=0.1, implementation=implementation
            )
        )
        ours = export.DisabledSafetyCheck.custom_call(gpu.KERNEL)
        with gpu.abstract() if "cuda" in platforms else contextlib.nullcontext():
            return export.export(call, platforms=platforms, disabled_checks=[ours])(
                *args
            ).mlir_module()

    for platform, kernel in (
        ("cpu", None),
        ("tpu", "@tpu_custom_call"),
        ("cuda", f"@{gpu.KERNEL}"),
    ):
        text = exported("auto", platform)
        assert [name for name in ("@tpu_custom_call", f"@{gpu.KERNEL}") if name in text] == (
            [kernel] if kernel else []
        )
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        exported("auto", "cpu", "tpu")
    assert "custom_call" not in exported("xla", "cpu", "tpu", "cuda")
