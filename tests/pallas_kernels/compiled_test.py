"""Every op in the shapes of real models: lowered for TPUs and GPUs, and compiled for TPUs, where
there is no accelerator.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import SingleDeviceSharding

from mint_jax.aot import chips
from mint_jax.models import quantised
from pallas_kernels import paged_attention, slot_lora
from pallas_kernels.calls import Call, calls
from pallas_kernels.packed_lora import shapes as lora_shapes
from pallas_kernels.packed_matmul import pallas_tpu as packed_matmul
from pallas_kernels.packed_matmul import shapes as matmul_shapes
from pallas_kernels.slot_lora import shapes as slot_shapes
from tests.marks import first
from tests.pallas_kernels import gpu

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
ON = {name: list(calls(jax.devices()[0], name)) for name in ("tpu", "cuda")}
TPU = "@tpu_custom_call"


def firsts(platform):
    """The calls of a platform, the first of each op quick and the others long."""
    quick = list({call.op: call for call in reversed(ON[platform])}.values())
    rest = [call for call in ON[platform] if call not in quick and is_real(call)]
    return first(len(quick), [*quick, *rest])


def is_real(call):
    """Returns False for gradients of sampling."""
    return call.op != "packed_lora backward" or call.shape in lora_shapes.TRAIN


def kernels_of(call):
    """Number of a GPU's kernels."""
    if call.op == "packed_lora backward":  # of the rows, of all A, of each B
        return 2 + len(call.shape.d_out)
    return 2 if call.op in ("packed_attention backward", "slot_lora") else 1


@pytest.mark.parametrize("call", firsts("tpu"), ids=lambda call: call.name)
def test_for_a_tpu_a_call_is_its_kernels_without_a_topology(call):
    text = jax.jit(call.fn).trace(*call.args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count(TPU) == 1 + (call.op == "packed_attention backward")


@pytest.mark.parametrize("call", firsts("cuda"), ids=lambda call: call.name)
def test_for_a_gpu_a_call_is_its_kernels_and_no_other_product(call):
    text = gpu.text(call.fn, *call.args)
    assert text.count(gpu.KERNEL) == kernels_of(call)
    assert "stablehlo.dot" not in text
    assert "ragged_dot" not in text
    if call.op.startswith("packed_lora"):
        K = len(call.shape.d_out)  # rows are added to in place
        assert text.count("output_operand_alias<") == (1 + 2 * K if "backward" in call.op else K)
    # others are named, and not chosen by platform
    if call.op != "slot_lora" and not call.op.startswith("packed_attention"):
        assert gpu.KERNEL not in jax.jit(call.fn).lower(*call.args).as_text()


def test_a_program_is_exported_for_one_platform_with_its_kernel_or_for_several_without():
    """JAX lowers every branch of ``platform_dependent`` for all platforms of a program: when it no
    longer does, docs/kernels.md changes.
    """
    call = next(one for one in ON["cuda"] if one.op == "paged_attention")

    def exported(implementation: str, *platforms: str) -> str:
        how = {"scale": 0.1, "implementation": implementation}
        fn = functools.partial(paged_attention.paged_attention, **how)
        checks = [export.DisabledSafetyCheck.custom_call(gpu.KERNEL)]
        with gpu.abstract() if "cuda" in platforms else contextlib.nullcontext():
            made = export.export(jax.jit(fn), platforms=platforms, disabled_checks=checks)
            return made(*jax.tree.map(lambda x: x.update(sharding=None), call.args)).mlir_module()

    for platform, kernel in (("cpu", None), ("tpu", TPU), ("cuda", f"@{gpu.KERNEL}")):
        text = exported("auto", platform)
        found = [name for name in (TPU, f"@{gpu.KERNEL}") if name in text]
        assert found == ([kernel] if kernel else [])
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        exported("auto", "cpu", "tpu")
    assert "custom_call" not in exported("xla", "cpu", "tpu", "cuda")


def temporaries(call):
    """Largest temporaries beside the kernel, bytes: never a copy of factors, matrices or keys."""
    s = call.shape
    if call.op == "paged_attention":  # queries and their numbers
        return 16 * s.rows * s.heads * max(s.queries, 8) * 128 + (3 << 20)
    if call.op == "latent_attention":
        return 16 * s.rows * s.queries * (s.latent + s.width) + (3 << 20)
    if call.op.startswith("packed_attention"):
        # Operands are laid out anew where lengths or widths are no multiples of 128.
        return 4 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(call.args)) + (16 << 20)
    if call.op == "packed_lora backward" and s.rank == 1:  # float32 sums that are converted
        return 4 * s.factors * (len(s.d_out) * s.d_in + sum(s.d_out)) + (2 << 20)
    return 3 << 20


def check(call, device):
    with jax.default_device(device):
        made = jax.jit(call.fn, donate_argnums=call.donated).lower(*call.args).compile()
    memory, text = made.memory_analysis(), made.as_text()
    number = 2 if call.op == "packed_attention backward" else 1
    assert text.count('custom_call_target="tpu_custom_call"') == number, call.name
    assert memory.temp_size_in_bytes < temporaries(call), call.name
    donated = jax.tree.leaves([call.args[i] for i in call.donated])
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in donated), call.name


def test_a_tpus_compiler_takes_a_kernel_with_nothing_large_beside_it():
    device = chips.target(CHIPS[0]).devices[0]
    check(next(one for one in calls(device, "tpu") if "paged" in one.op), device)


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
def test_a_tpus_compiler_takes_all_real_shapes(chip):
    """With experts of 8 bits too, and slot LoRA in two parts."""
    device = chips.target(chip).devices[0]

    def spec(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))

    for call in calls(device, "tpu"):
        if is_real(call):
            check(call, device)
        if call.op == "packed_matmul" and call.shape in matmul_shapes.SHAPES[1:3]:
            x, w, sizes, a, b, factor = call.args
            for kind, (dtype, *_) in quantised.KINDS.items():
                small = [spec(*one.shape, dtype=dtype) for one in w]
                scales = [spec(len(one), one.shape[2], dtype="float32") for one in w]
                rest = sizes, a, b, factor, None, spec(dtype="int32"), scales
                eight = call._replace(fn=packed_matmul.matmul, args=(x, small, *rest))
                check(eight._replace(shape=(*call.shape, kind)), device)
    for s in (*slot_shapes.DECODE, *slot_shapes.PREFILL):
        of, slot = functools.partial(spec, dtype=s.dtype), spec(s.rows, dtype="int32")
        (F,), kernel = s.d_out, slot_lora.pallas_tpu
        a, b = of(s.factors, s.rank, s.d_in), of(s.factors, s.rank, F)
        inner = spec(s.rows, s.rank, dtype="float32")
        for fn, args, donated in (
            (kernel.shrink, (of(s.rows, s.d_in), a, slot), ()),
            (kernel.expand, (inner, b, of(s.rows, F), slot), (2,)),
        ):
            check(Call("slot_lora", s, fn, args, donated, lambda rng: ()), device)
