"""float32 means float32 on every device: what programs lowered for a TPU ask of each product."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.aot.programs import Plan, RolloutShape, TrainShape
from mint_jax.lora.tree import AdapterConfig
from mint_jax.rollout import score

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


def test_a_choice_of_the_user_stands(tiny_base, mesh):
    plan = Plan(tiny_base("llama").cfg, mesh, jnp.float32, AdapterConfig(4))
    train, _ = plan.training(SHAPES[0])
    with jax.default_matmul_precision("high"):
        assert set(precisions(train.trace(mesh))) == {("HIGH",)}


def test_the_cpu_computes_the_same_bits(tiny_base, rng):
    base = tiny_base("llama")
    tokens = rng.integers(3, base.cfg.vocab_size, (2, 9)).astype(np.int32)
    ours = score.next_token_logprobs(base.params, None, tokens, cfg=base.cfg)
    with jax.default_matmul_precision("default"):
        np.testing.assert_array_equal(
            ours, score.next_token_logprobs(base.params, None, tokens, cfg=base.cfg)
        )
