"""Law: tokens travel to the experts, never an expert to the tokens; and no expert is copied.

In the compiled training step of a tiny Qwen3-MoE over eight devices no collective carries an array
as large as one layer's expert matrices of one device, nor one that has both dimensions of such a
matrix. The dimensions are chosen so that every activation and every adapter is smaller than these.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.aot import chips, hlo, programs
from mint_jax.aot.measure import measure
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import expert_parallel, transformer
from mint_jax.models.config import Experts, ModelConfig
from mint_jax.train import state as state_lib
from mint_jax.train import step
from tests.laws.vmap_one_matmul_test import training_batch

SHAPE = {"vocab_size": 96, "d_model": 48, "num_layers": 2, "d_ff": 80, "qk_norm": True}
SHAPE |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
CFG = ModelConfig("qwen3_moe", **SHAPE, experts=Experts(count=16, per_token=2, width=112))
SIZES = {"fsdp": 2, "expert": 2, "tensor": 2}
P, B, T, M = 2, 4, 7, 3  # policies, rows of each, tokens and targets of a row


def collectives(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of everything that collectives of a compiled program read or write."""
    module, out = hlo.Module(text), []
    for i in (i for body in module.computations.values() for i in body):
        if (op := i.op.removesuffix("-start")) in hlo.COLLECTIVES:
            types = [i.type, *(module.types[name] for name in i.operands if name in module.types)]
            out += [(op, hlo.shape(one)) for kind in types for one in hlo.arrays(kind)]
    return out


def _compiled() -> str:
    mesh, specs = make_mesh(SIZES), transformer.abstract(CFG)
    params = params_lib.abstract(specs, sharding.shardings(specs, mesh))
    state = jax.eval_shape(lambda: state_lib.empty(specs, [AdapterConfig(1)] * P))

    batch, coefs = training_batch(P, B, T, M)
    slots = {1: jax.ShapeDtypeStruct((P,), jnp.int32)}
    args = params, state, batch, coefs, slots
    with jax.set_mesh(mesh):
        step.forward_backward.clear_cache()
        lowered = step.forward_backward.lower(*args, cfg=CFG, remat="names")
        return lowered.compile().as_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("limit", "travels"), [(1 << 30, "all-gather"), (0, "all-to-all")], ids=["gather", "all_to_all"]
)
def test_no_collective_carries_an_expert(limit, travels, monkeypatch):
    monkeypatch.setattr(expert_parallel, "GATHER_TOKENS", limit)
    assert CFG.experts is not None
    D, F, here = CFG.d_model, CFG.experts.width, CFG.experts.count // math.prod(SIZES.values())
    routed = P * B * T * CFG.experts.per_token
    assert routed * D < here * D * F, "an activation must not be mistaken for an expert"
    text = _compiled()
    # a device holds whole experts, and its share of them only
    assert re.search(rf"\[(?:\d+,)?{here},{D},{F}\]", text)
    carried = collectives(text)
    assert any(name == travels and D in shape for name, shape in carried), "tokens travel"
    for name, shape in carried:
        assert math.prod(shape) < here * D * F, f"{name} of {list(shape)}"
        assert not {D, F} <= set(shape), f"{name} of {list(shape)}"
    step.forward_backward.clear_cache()


def made(text: str, shape: tuple[int, ...]) -> list[str]:
    """What a compiled program makes of this shape, be it with axes of 1."""
    module = hlo.Module(text)
    ours = ("parameter", "get-tuple-element", "bitcast", "constant")
    return [
        f"{i.op} {i.type}"
        for body in module.computations.values()
        for i in body
        if i.op not in ours
        and any(tuple(n for n in hlo.shape(a) if n != 1) == shape for a in hlo.arrays(i.type))
    ]


def test_decoding_copies_no_layer_of_experts():
    """In the scan over layers a layer's experts are not sliced out of their stack: that is a copy
    of all, and a row visits a few.
    """
    assert CFG.experts is not None
    mesh = single_device_mesh()
    plan = programs.Plan(CFG, mesh, jnp.float32, AdapterConfig(4))
    program = plan.sampling(programs.RolloutShape(2, 2, 2, 40, 40))[1]
    with jax.set_mesh(mesh):
        text = program.trace(mesh).lower().compile().as_text()
    E, D, F = CFG.experts.count, CFG.d_model, CFG.experts.width
    assert re.search(rf"\[2,{E},{D},{F}\]", text), "the stack is there"
    assert not made(text, (E, D, F)) + made(text, (E, F, D))


# so large that the compiler does not bring a stack into a core's memory
D, F, E, L = 2048, 768, 128, 3
TPU = {"vocab_size": 1024, "d_model": D, "num_layers": L, "d_ff": 256, "qk_norm": True}
TPU |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
TARGETS = pytest.mark.parametrize(
    "targets", [("all-linear",), ("q", "o")], ids=["adapters of experts", "of attention"]
)


def tpu_plan(targets, quantise=""):
    cfg = ModelConfig("qwen3_moe", **TPU, experts=Experts(count=E, per_token=4, width=F))
    target = chips.target("v5e:2x4")
    mesh, adapter = (
        make_mesh({"expert": 8}, list(target.devices)),
        AdapterConfig(4, targets=targets),
    )
    return programs.Plan(cfg, mesh, jnp.bfloat16, adapter, quantise), target


@pytest.mark.long
@pytest.mark.parametrize("quantise", ["", "int8", "float8"])
@TARGETS
def test_a_tpu_reads_experts_from_where_they_are(targets, quantise):
    """Ahead of time: the kernel takes the whole stack, so that a step of decoding has no room for a
    layer's experts.
    """
    plan, target = tpu_plan(targets, quantise)
    decode = plan.sampling(programs.RolloutShape(2, 8, 2, 128, 128))[1]
    m = measure(decode, plan.mesh, target)
    assert "packed_matmul" in m.text
    assert not made(m.text, (E // 8, D, F)) + made(m.text, (E // 8, F, D))
    # a tenth of a layer's experts, which were 71 % when they were sliced
    assert m.temporaries < 3 * E // 8 * D * F * 2 / 10


@pytest.mark.long
@TARGETS
def test_a_tpus_training_step_copies_no_stack_of_experts(targets):
    """Ahead of time, three layers: backward each layer's matrices are turned, and never those of
    all layers at once.
    """
    plan, target = tpu_plan(targets)
    step = plan.training(programs.TrainShape(policies=4, rows=2, tokens=256, targets=128))[0]
    m = measure(step, plan.mesh, target)
    stacks = [(*many, *one) for many in ((L, E // 8), (L * E // 8,)) for one in ((D, F), (F, D))]
    lines = m.text.splitlines()
    text = "\n".join(line for line in lines if " while(" not in line and " tuple(" not in line)
    assert not [one for stack in stacks for one in made(text, stack)]
