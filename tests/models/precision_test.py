"""Products are as exact as the base is stored, and no more: what programs lowered for TPUs and GPUs
ask of each product.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from mint_jax import params as params_lib
from mint_jax.aot.programs import Plan, RolloutShape, TrainShape
from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout import score
from tests.pallas_kernels import gpu

SHAPES = (
    TrainShape(policies=2, rows=2, tokens=16, targets=8, remat="names"),
    RolloutShape(2, 4, 2, 8, 6),
)


def precisions(traced) -> Counter:
    """What the products of a program, lowered for a TPU, ask for; one that asks for nothing is
    ``DEFAULT``.
    """
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    products = [
        line
        for line in text.splitlines()
        if re.search(r"(dot_general|chlo.ragged_dot)\"?[ (]", line)
    ]
    assert products
    return Counter(
        tuple(sorted(set(re.findall(r"HIGHEST|HIGH|DEFAULT", line)))) or ("DEFAULT",)
        for line in products
    )


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("dtype", "wanted"), [(jnp.float32, ("HIGHEST",)), (jnp.bfloat16, ("DEFAULT",))]
)
def test_every_product_is_as_exact_as_the_base_is_stored(family, dtype, wanted, tiny_base, mesh):
    """Forward and backward, of attention, experts, adapters, router and unembedding; sampling and
    scoring too.
    """
    cfg = tiny_base(family).cfg
    plan = Plan(
        cfg,
        mesh,
        dtype,
        AdapterConfig(4, targets=("all-linear", *(["router"] if cfg.experts else []))),
    )
    programs = {p.name: p.trace(mesh) for p in plan.programs(*SHAPES) if p.name != "optim"}
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    programs["score"] = jax.jit(functools.partial(score.next_token_logprobs, cfg=cfg)).trace(
        plan.params, None, tokens
    )
    for name, traced in programs.items():
        assert set(precisions(traced)) == {wanted}, name


DOT = re.compile(r"stablehlo\.dot_general .*: \(tensor<(\S+)>, tensor<(\S+)>\) -> ")


def frozen_operands(family, quantise, tiny_base, mesh) -> dict[str, set[str]]:
    """Dtypes of the frozen matrices that a training step over a bfloat16 base multiplies on a GPU,
    each with that of the other operand, by shape; but the router's, whose choices are discrete.
    """
    cfg = tiny_base(family).cfg
    adapter = AdapterConfig(4, targets=("all-linear",))
    plan = Plan(cfg, mesh, jnp.bfloat16, adapter, quantise)
    step, _ = plan.training(TrainShape(2, 2, 17, 8, "names"))  # no dimension of the model is 17
    text = gpu.text(step.fn, *step.args)
    leaves = params_lib.leaves_with_path(plan.specs)
    shapes = {
        "x".join(map(str, spec.shape[-2:]))
        for path, spec in leaves
        if path.endswith("/w") and "router" not in path and "experts" not in path
    }
    found = {}
    for operands in DOT.findall(text):
        dims, dtypes = zip(*(one.rpartition("x")[::2] for one in operands))
        for shape in shapes.intersection(dims):
            found.setdefault(shape, set()).update(dtypes)
    assert found.keys() == shapes
    return found


@pytest.mark.parametrize("quantise", ["", "int8", "float8"])
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3_moe", "glm"))]
)
def test_a_gpu_multiplies_a_bfloat16_base_in_bfloat16(family, quantise, tiny_base, mesh):
    """Forward and backward: a float32 cotangent has a GPU multiply in TF32, at half the speed."""
    found = frozen_operands(family, quantise, tiny_base, mesh)
    assert all(dtypes == {"bf16"} for dtypes in found.values()), found
