"""Every op in the shapes of real models: compiled for TPUs and lowered for GPUs, where there is no
accelerator.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from mint_jax.aot import chips, kernel_calls
from mint_jax.models import quantised
from pallas_kernels import slot_lora
from pallas_kernels.packed_lora import shapes as lora_shapes
from pallas_kernels.packed_matmul import pallas_tpu as packed_matmul
from pallas_kernels.packed_matmul import shapes as matmul_shapes
from pallas_kernels.slot_lora import shapes as slot_shapes
from tests.marks import first
from tests.pallas_kernels import gpu

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
PAGED = next(one for one in kernel_calls.calls(jax.devices()[0], "tpu") if "paged" in one.op)
ON_GPUS = list(kernel_calls.calls(jax.devices()[0], "cuda"))


def firsts(calls):
    """The first call of each op."""
    return list({call.op: call for call in reversed(calls)}.values())


def kernels_of(call):
    """Number of a GPU's kernels."""
    if call.op == "packed_lora backward":  # of the rows, of all A, of each B
        return 2 + len(call.shape.d_out)
    return 2 if call.op in ("packed_attention backward", "slot_lora") else 1


@pytest.mark.parametrize(
    "call",
    first(
        len(firsts(ON_GPUS)),
        [*firsts(ON_GPUS), *(call for call in ON_GPUS if call not in firsts(ON_GPUS))],
    ),
    ids=lambda call: call.name,
)
def test_for_a_gpu_a_call_is_its_kernels_and_no_other_product(call):
    text = gpu.text(call.fn, *call.args)
    assert text.count(gpu.KERNEL) == kernels_of(call)
    assert "stablehlo.dot" not in text
    assert "ragged_dot" not in text
    if call.op.startswith("packed_lora"):
        K = len(call.shape.d_out)  # rows are added to in place
        assert text.count("output_operand_alias<") == (1 + 2 * K if "backward" in call.op else K)
    if call.op != "slot_lora":  # which is named, and not chosen by platform
        assert gpu.KERNEL not in jax.jit(call.fn).lower(*call.args).as_text()


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
    [call] = (one for one in kernel_calls.calls(device, "tpu") if one.name == PAGED.name)
    check(call, device)


@pytest.mark.long
@pytest.mark.parametrize("chip", CHIPS)
def test_a_tpus_compiler_takes_all_real_shapes(chip):
    """With experts of 8 bits too, and slot LoRA in two parts."""
    device = chips.target(chip).devices[0]

    def spec(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))

    for call in kernel_calls.calls(device, "tpu"):
        if call.op == "packed_lora backward" and call.shape in lora_shapes.DECODE:
            continue  # sampling has no gradients
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
            check(kernel_calls.Call("slot_lora", s, fn, args, donated, lambda rng: ()), device)
