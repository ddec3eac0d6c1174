"""Law 4: a policy of rank r costs work of rank r, and slots that are not in the batch cost
nothing.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from mint_jax import params as params_lib
from mint_jax.aot import chips, scale_up
from mint_jax.aot.measure import measure
from mint_jax.aot.programs import device_bytes
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, bucket_of
from mint_jax.lora.view import attach_blocks
from mint_jax.models import transformer
from mint_jax.models.config import Experts, ModelConfig
from mint_jax.rollout import device, plans
from mint_jax.rollout.samples import longest_table
from mint_jax.rollout.score import next_token_logprobs
from mint_jax.train import state as state_lib
from mint_jax.train import step
from tests.configs import load
from tests.laws.vmap_one_matmul_test import training_batch
from tests.marks import first

# One layer, for XLA's count takes the body of a loop once whatever its length.
SIZES = {"vocab_size": 40, "d_model": 48, "num_layers": 1, "d_ff": 80}
CFG = ModelConfig("llama", **SIZES, num_heads=4, num_kv_heads=2, head_dim=16)
IN_PLUS_OUT = 2 * (48 + 64) + 2 * (48 + 32) + 3 * (48 + 80)  # q o, k v, gate up down
MOE = CFG.replace(experts=Experts(count=6, per_token=2, width=56))
B, T, M = 2, 24, 8


def counts(ranks):
    return dict(collections.Counter(rank and bucket_of(rank) for rank in ranks))


def shapes(ranks, resident, cfg):
    """Base parameters, training state and slots of policies of these ranks; 0 is a bias."""
    specs = transformer.abstract(cfg)
    configs = [AdapterConfig(r, kind="lora" if r else "bias") for r in ranks]
    slots = {b: jax.ShapeDtypeStruct((n,), jnp.int32) for b, n in counts(ranks).items()}
    state = jax.eval_shape(lambda: state_lib.empty(specs, configs, dict(resident)))
    return params_lib.abstract(specs), state, slots


@functools.cache
def compiled(program, ranks, resident=(), cfg=CFG):
    """One of ``PROGRAMS`` over policies of these ranks, B rows each; ``resident`` says how many
    slots each bucket has.
    """
    params, state, slots = shapes(ranks, resident, cfg)
    if program == "optim_step":
        hyper = {b: state_lib.stack_hyper([], n) for b, n in counts(ranks).items()}
        return step.optim_step.lower(state, slots, hyper).compile()
    if program == "score":
        stacks = {bucket: stack.adapters for bucket, stack in state.items()}
        lora = jax.eval_shape(attach_blocks, stacks, slots)
        tokens = jax.ShapeDtypeStruct((B * len(ranks), T + 1), jnp.int32)
        return next_token_logprobs.lower(params, lora, tokens, cfg=CFG).compile()
    args = params, state, *training_batch(len(ranks), B, T, M), slots
    return step.forward_backward.lower(*args, cfg=cfg, remat="names").compile()


def flops(*args) -> float:
    return compiled(*args).cost_analysis()["flops"]


# x A^T and h B are 2 R (D + F) flops a token; backward again twice that, for the factors' and for
# the inputs' gradients
@pytest.mark.parametrize(("program", "per_weight"), [("forward_backward", 6), ("score", 2)])
def test_flops_of_a_policy_follow_its_rank(program, per_weight):
    low, high, mixed, odd, biases = (
        flops(program, ranks)
        for ranks in ((1, 1, 1, 1), (64, 64, 64, 64), (1, 1, 1, 64), (1, 1, 3, 33), (0, 0, 0, 0))
    )
    per_rank = (high - low) / (4 * 63)
    # 10 %: the gradient of the first layer's input is not needed, and additions are counted too
    assert per_rank == pytest.approx(per_weight * B * T * IN_PLUS_OUT, rel=0.1)
    # 10 % of the adapters' own work: joining the buckets' rows and adding their parts costs a
    # little more than one bucket
    assert mixed - low == pytest.approx(63 * per_rank, rel=0.1), "rank 1 pays for its own rank"
    # rank 3 pays for bucket 4, rank 33 for bucket 64
    assert odd - mixed == pytest.approx(3 * per_rank, abs=0.1 * 63 * per_rank)
    # the inputs are half of a rank's ends, and a bias has none
    assert biases < low - 0.4 * 4 * per_rank, "a bias pays for its outputs only"


def test_flops_of_an_update_follow_the_rank():
    # a bucket is one loop over its policies
    low, high, mixed = (flops("optim_step", ranks) for ranks in ((1,), (64,), (1, 64)))
    assert mixed == pytest.approx(low + high, rel=0.01), "rank 1 pays for its own rank"
    assert high == pytest.approx(64 * low, rel=0.2)  # what does not depend on the rank is small


@pytest.mark.parametrize("program", ["forward_backward", "optim_step"])
def test_slots_that_are_not_in_the_batch_cost_nothing(program):
    few, many = (compiled(program, (1, 1, 1, 64), ((1, 3), (64, n))) for n in (2, 30))
    # clamping a few indices is counted
    assert many.cost_analysis()["flops"] == pytest.approx(few.cost_analysis()["flops"], rel=1e-3)
    one_slot = 4 * 64 * IN_PLUS_OUT  # bytes of one more policy's factors
    more, less = many.memory_analysis(), few.memory_analysis()
    in_place = more.alias_size_in_bytes - less.alias_size_in_bytes
    assert in_place >= 28 * 4 * one_slot, "the state is updated where it is"
    copied = more.temp_size_in_bytes - less.temp_size_in_bytes
    assert copied < one_slot, f"28 slots cost {copied / one_slot:.0f} times an adapter in copies"


def test_a_step_has_its_policies_gradients_beside_their_factors_and_no_copy_of_these():
    """Bound before the layers, all policies' factors were a second array of the gradients' size."""
    cfg = CFG.replace(num_layers=12)
    low, high = (
        compiled("forward_backward", (rank,) * 4, (), cfg).memory_analysis().temp_size_in_bytes
        for rank in (1, 64)
    )
    factors = 4 * 4 * 63 * IN_PLUS_OUT * cfg.num_layers / CFG.num_layers
    # a quarter: a layer's own factors, and the rank-wide products of the rows
    assert factors <= high - low < 1.25 * factors, f"{(high - low) / factors:.2f} times the factors"


@pytest.mark.parametrize("cfg", first(1, [CFG, MOE]), ids=["dense", "experts"])
@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_sampling_costs_the_same_however_many_adapters_are_resident(program, cfg):
    """Two rows or blocks, out of 2 adapters or of 16."""
    specs, table = transformer.abstract(cfg), longest_table(T + M)
    params, pool = params_lib.abstract(specs), device.pool_specs(cfg, 8, jnp.float32, routes=False)

    def cost(resident):
        make = functools.partial(lora_tree.empty_stack, specs, lora_tree.LINEAR_TARGETS)
        stacks = jax.eval_shape(lambda: {4: make(4, resident)})
        if program == "prefill":
            run, plan = device.prefill, [plans.blocks_plan([[]], 2, table, stacks)]
        else:
            rows, _ = plans.rows_plan([], 2, 1, table, cfg.vocab_size, stacks)
            run, plan = device.decode, [rows, jnp.int32(1)]
        compiled = run.lower(params, stacks, pool, *plan, cfg=cfg).compile()
        return compiled.cost_analysis(), compiled.memory_analysis()

    (few, few_memory), (many, many_memory) = cost(2), cost(16)
    # clamping a few indices is counted
    assert many["flops"] == pytest.approx(few["flops"], rel=1e-3)
    # XLA counts a lookup as a read of the whole table, though it reads the two slots: all else must
    # read the same
    lookup = many_memory.argument_size_in_bytes - few_memory.argument_size_in_bytes
    assert many["bytes accessed"] - few["bytes accessed"] <= 1.01 * lookup
    one_slot = params_lib.nbytes(lora_tree.stack_specs(specs, lora_tree.LINEAR_TARGETS, 4, 1))
    assert lookup == 14 * one_slot + 14 * 4  # factors and scales
    # nothing is copied for adapters that nobody uses
    assert many_memory.temp_size_in_bytes - few_memory.temp_size_in_bytes < one_slot


@pytest.mark.long
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x4"])
def test_a_pods_optimizer_changes_its_state_in_place_factor_by_factor(topology):
    """Sixteen policies of rank 32 on Qwen3-4B, ahead of time: temporaries are less than half of
    what one policy has on a device.
    """
    config = load("configs/scale_up/qwen3_4b.py")
    target = chips.target(topology)
    plan = scale_up.plan_of(config, target)
    _, program = plan.training(config.train)
    made = measure(program, plan.mesh, target)
    assert made.aliased >= 0.99 * device_bytes(program.args[0]), "the state stays where it is"
    assert made.temporaries < made.aliased / config.train.policies / 2
