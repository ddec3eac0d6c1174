"""Laws 1 and 4: P policies cost adapter and optimizer bytes only, and no program makes or returns
an array of a base weight's shape.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax.data.buckets import ShapeBook
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.lora.view import attach_blocks
from mint_jax.models import transformer
from mint_jax.rollout import device, plans
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import longest_table
from mint_jax.rollout.score import next_token_logprobs
from mint_jax.train import state as state_lib
from mint_jax.train import step
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.losses import stack_coefs
from mint_jax.train.trainer import Trainer
from tests.groups import pack, random_groups
from tests.laws.vmap_one_matmul_test import equations

RANKS = (1, 3, 3)  # buckets 1, 4, 4
LAYOUT = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "slice", "dynamic_slice"}
LAYOUT |= {"convert_element_type", "copy", "stop_gradient"}


def device_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


def adapter_bytes(cfg, bucket: int) -> int:
    """Float32 bytes of all seven projections' A [L, R, D] and B [L, R, F], from the model's
    dimensions.
    """
    D, F = cfg.d_model, cfg.d_ff
    q, kv = (n * cfg.head_dim for n in (cfg.num_heads, cfg.num_kv_heads))
    in_and_out = [(D, q), (D, kv), (D, kv), (q, D), (D, F), (D, F), (F, D)]
    return 4 * cfg.num_layers * bucket * sum(d_in + d_out for d_in, d_out in in_and_out)


def trainer_of(base, ranks) -> Trainer:
    policies = [PolicyConfig(f"p{i}", AdapterConfig(r), seed=i) for i, r in enumerate(ranks)]
    return Trainer(base, policies)


@pytest.mark.parametrize("policies", [1, 12])
def test_policies_in_training_cost_four_times_their_adapters(tiny_base, policies):
    base = tiny_base("llama")
    before = device_bytes()
    trainer = trainer_of(base, [3] * policies)
    # factors, gradient sum, two moments, at the bucket of rank 3
    expected = 4 * policies * adapter_bytes(base.cfg, 4)
    # 1 %: scales, hyperparameters and counters are a few dozen numbers a policy
    assert expected <= device_bytes() - before <= 1.01 * expected
    held = device_bytes()
    Engine(base).generate([Request((5, 6), trainer.slots["p0"], max_tokens=2)], trainer.stacks)
    # the sampler reads the trainer's own stacks: what is left of its call is small constants, no
    # copy of an adapter
    assert device_bytes() - held < adapter_bytes(base.cfg, 4) // 10


def test_resident_policies_have_no_optimizer_state(tiny_base, rng):
    cfg = tiny_base("llama").cfg
    specs = transformer.abstract(cfg)
    c = AdapterConfig(3)
    adapters = {f"p{i}": (c, lora_tree.init_adapter(specs, c, i)) for i in range(9)}
    before = device_bytes()
    stacks, slots = lora_tree.stack_adapters(specs, adapters)
    expected = 9 * adapter_bytes(cfg, 4)
    assert expected <= device_bytes() - before <= 1.01 * expected  # 1 %: one scale a slot
    assert len(set(slots.values())) == 9
    del stacks


def programs(trainer, rng):
    """Every program that reads the base or the training state, with arguments."""
    cfg, params = trainer.base.cfg, trainer.base.params
    names = list(trainer.slots)
    batch, _ = pack([random_groups(rng, cfg.vocab_size) for _ in names], ShapeBook())
    coefs, slots = stack_coefs([LossConfig() for _ in names]), {}
    for at in trainer.slots.values():
        slots[at.bucket] = np.append(slots.get(at.bucket, []), at.index).astype(np.int32)
    hyper = {b: state_lib.stack_hyper([], len(own)) for b, own in slots.items()}
    P, table = len(names), longest_table(40)
    lora = attach_blocks(trainer.stacks, {b: jnp.asarray(s) for b, s in slots.items()})
    sampling = params, trainer.stacks, device.pool_specs(cfg, 16, jnp.float32, routes=False)
    # not as many blocks as layers, whose keys are as wide as a page is long
    plan = functools.partial(plans.blocks_plan, [[]], P + 2, table, trainer.stacks)
    rows, _ = plans.rows_plan([], 2 * P, 1, table, cfg.vocab_size, trainer.stacks)
    texts = np.full((P, 11), 3, np.int32)
    training = functools.partial(step.forward_backward, remat="names")
    made = {
        "training": (training, (params, trainer.state, batch, coefs, slots)),
        "score": (step.score, (params, batch, coefs, trainer.stacks, slots)),
        "score of the base": (step.score, (params, batch, coefs, {}, {})),
        "next_token_logprobs": (next_token_logprobs, (params, lora, texts)),
        "prefill": (device.prefill, (*sampling, plan(False))),
        "prefill with scores": (device.prefill, (*sampling, plan(True))),
        "decode": (device.decode, (*sampling, rows, jnp.int32(6))),
    }
    bound = {name: (functools.partial(fn, cfg=cfg), args) for name, (fn, args) in made.items()}
    return bound | {"optim_step": (step.optim_step, (trainer.state, slots, hyper))}


def test_no_program_makes_or_returns_a_base_weight(tiny_base, rng):
    trainer = trainer_of(tiny_base("llama"), RANKS)
    weights = {x.shape for x in jax.tree.leaves(trainer.base.params) if x.ndim > 1}
    large = [s for s in weights if s[-2] > trainer.base.cfg.num_layers]
    matrices = {(*s[:-2], *pair) for s in large for pair in (s[-2:], s[-2:][::-1])}
    matrices |= {s[-2:] for s in matrices}  # of one layer
    for name, (fn, args) in programs(trainer, rng).items():
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        returned = {x.shape for x in jax.tree.leaves(out)}
        assert not returned & (weights | matrices), f"{name} returns a base weight's shape"
        # W + B A or a gradient of W would be a result of W's shape; relabelling W itself is none.
        for e in equations(jaxpr.jaxpr):
            made = {getattr(x.aval, "shape", None) for x in e.outvars}
            assert e.primitive.name in LAYOUT or not made & matrices, f"{name}: {e.primitive}"
