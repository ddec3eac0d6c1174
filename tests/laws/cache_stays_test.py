"""The cache stays where it is: prefill and decoding neither copy its pages, nor turn them, nor send
them to another device.

Key heads that a mesh divides and such that it does not, latents that all heads share, and latents
with an indexer, whose keys are read inside a condition: on eight CPU devices, where tokens are
compared too, and ahead of time on TPUs.

Axes: L layers, U pages, Q prompts, G rollouts of a prompt, K kv heads, T prompt tokens, C new
tokens.
"""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import multihost, sharding
from mint_jax import params as params_lib
from mint_jax.aot import chips, hlo, programs, scale_up
from mint_jax.aot.measure import measure
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import transformer
from mint_jax.models.config import Indexer, Latent, ModelConfig
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device, plans
from mint_jax.rollout.pages import PagePool, pages_for
from mint_jax.rollout.request import Request
from mint_jax.rollout.samples import CachedPrompt, longest_table
from mint_jax.rollout.scheduler import Scheduler
from tests.configs import read

pytestmark = pytest.mark.bits

MOVES = ("copy", "transpose")


def keys_of(pool):
    """Its large parts: all but the tokens themselves."""
    return jax.tree.leaves({name: part for name, part in pool.items() if name != "tokens"})


def shard(x):
    return x.sharding.shard_shape(x.shape)


def large(text, least, ops):
    """Instructions of these kinds, in fusions too, that make or take an array of at least so many
    bytes.
    """
    module = hlo.Module(text)
    found = []
    for i in (i for body in module.computations.values() for i in body):
        types = [i.type, *(module.types[name] for name in i.operands if name in module.types)]
        begins = i.op != "copy-start" and i.op.removesuffix("-start") in ops
        if begins and max(map(hlo.nbytes, types)) >= least:
            found.append(f"{i.op} {i.type}")
    return found


def copied(text, pool):
    """Copies, those that go on beside others too, of a whole part of the pool on a device."""
    shapes = {shard(x) for x in keys_of(pool)}
    made = (i for body in hlo.Module(text).computations.values() for i in body)
    copies = (i for i in made if i.op.startswith("copy"))
    return [f"{i.op} {i.type}" for i in copies if shapes & set(map(hlo.shape, hlo.arrays(i.type)))]


def check(text, pool):
    """No copy of a part of the pool, and nothing of the size of one layer's smallest part moved or
    sent.
    """
    least = min(math.prod(shard(x)[1:]) * x.dtype.itemsize for x in keys_of(pool))
    assert not copied(text, pool)
    assert not large(text, least, MOVES)
    assert not large(text, least, hlo.COLLECTIVES)


T, C = 300, 200
SIZES = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "d_ff": 64}
LATENT = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 56}
LATENT |= {"latent": Latent(q_latent=40, kv_latent=48, nope=16, rope=40, value=16)}  # type: ignore[dict-item]
HEADS = {"num_heads": 16, "head_dim": 32, "qk_norm": True}
INDEXER = Indexer(4, 64, 100, True, (True, False))
FAMILIES = {
    "heads divided": ModelConfig("qwen3", **SIZES, **HEADS, num_kv_heads=8),
    "heads whole": ModelConfig("qwen3", **SIZES, **HEADS, num_kv_heads=4),
    "latents": ModelConfig("deepseek_v3", **SIZES, **LATENT),
    "indexer": ModelConfig("glm_moe_dsa", **SIZES, **LATENT, indexer=INDEXER),
}


def planned(cfg, mesh, prompts, G):
    """The plans of prefills and one decode as the engine makes them, pages of each part, and the
    row of each sample.
    """
    parts, table = device.page_parts(cfg, mesh), longest_table(T + C)
    here = -(-len(prompts) // parts)
    # more than is asked for: temporaries are of the rows, not of the pool
    count = 4 * here * (pages_for(T, PAGE) + G * pages_for(C, PAGE))
    schedule = Scheduler([PagePool(count, PAGE) for _ in range(parts)], here * G)
    for prompt in prompts:
        request = Request(tuple(prompt), max_tokens=C, temperature=0, n=G)
        schedule.add(CachedPrompt(request, ("", None)), None)
    schedule.admit(lambda sample: None, C)
    blocks = []
    while any(todo := schedule.to_prefill(16 // parts)):
        blocks.append(plans.blocks_plan(todo, 16, table, ()))
    todo = schedule.to_decode(C, lambda sample: None)
    rows, places = plans.rows_plan(todo, parts * here * G, parts, table, cfg.vocab_size, ())
    assert len(places) == len(prompts) * G
    return blocks, rows, count, places


@pytest.mark.long
@pytest.mark.parametrize(("family", "G"), [*((f, 2) for f in FAMILIES), ("heads whole", 1)])
def test_eight_devices_sample_as_one_and_keep_their_part_of_the_cache(family, G):
    cfg, Q = FAMILIES[family], 16
    # fixed, and so are the weights: greedy, lest two logits be nearly equal
    rng = np.random.default_rng(7)
    specs = transformer.abstract(cfg)
    params = multihost.to_host(params_lib.init(specs, jax.random.key(7)))
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in rng.integers(T // 2, T, Q)]
    results = []
    for mesh in (single_device_mesh(), make_mesh({"tensor": 8})):
        placed = jax.device_put(params, sharding.shardings(specs, mesh))
        blocks, rows, count, places = planned(cfg, mesh, prompts, G)
        pool = device.empty_pool(cfg, mesh, count, jnp.float32)
        for leaf in keys_of(pool):
            assert leaf.size == mesh.size * leaf.addressable_shards[0].data.size
        bytes_here = programs.device_bytes(pool)
        with jax.set_mesh(mesh):
            compiled = device.prefill.lower(placed, {}, pool, blocks[0], cfg=cfg).compile()
            drawing = device.decode.lower(placed, {}, pool, rows, np.int32(9), cfg=cfg).compile()
            for program in (compiled, drawing):
                check(program.as_text(), pool)
                memory = program.memory_analysis()
                assert memory.alias_size_in_bytes >= bytes_here, "the pool is written where it is"
                assert memory.temp_size_in_bytes < bytes_here / 2
            where = jax.tree.map(lambda x: x.sharding, pool)
            for plan in blocks:
                pool, _ = device.prefill(placed, {}, pool, plan, cfg=cfg)
            pool, drawn = device.decode(placed, {}, pool, rows, np.int32(9), cfg=cfg)
            stays = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), pool, where)
            assert all(jax.tree.leaves(stays)), "a part has moved"
        drawn = jax.device_get(drawn)
        assert (drawn.count[places] == 9).all()
        results.append((drawn.tokens[places, :9], drawn.logprobs[places, :9]))
    (tokens, one), (tokens8, eight) = results
    np.testing.assert_array_equal(tokens8, tokens)
    # float32 sums in parts
    np.testing.assert_allclose(eight, one, atol=1e-5 * max(1, np.abs(one).max()))


POD = {"vocab_size": 1024, "d_model": 256, "num_layers": 2, "d_ff": 256}
INDEXER_POD = Indexer(8, 128, 512, True, (True, False))
LATENT_POD = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 128}
LATENT_POD |= {"latent": Latent(q_latent=128, kv_latent=256, nope=64, rope=64, value=64)}  # type: ignore[dict-item]


@pytest.mark.long
@pytest.mark.parametrize(
    "cfg",
    [
        ModelConfig("qwen3", **POD, num_heads=16, num_kv_heads=4, head_dim=128),
        ModelConfig("qwen3", **POD, num_heads=16, num_kv_heads=8, head_dim=64),
        ModelConfig("deepseek_v3", **POD, **LATENT_POD),
        ModelConfig("glm_moe_dsa", **POD, **LATENT_POD, indexer=INDEXER_POD),
    ],
    ids=["four heads", "eight narrow heads", "latents", "indexer"],
)
def test_a_pod_samples_without_moving_the_cache(cfg):
    """Eight TPU chips, ahead of time: heads, rows and widths whose tiles the compiler might want in
    another order.
    """
    target, adapter = chips.target("v5e:2x4"), AdapterConfig(4, targets=("o",))
    mesh = make_mesh({"tensor": 8}, list(target.devices))
    plan = programs.Plan(cfg, mesh, jnp.bfloat16, adapter)
    for program in plan.sampling(programs.RolloutShape(2, 16, 8, 2048, 2048)):
        pool = program.args[2]
        here, keys = programs.device_bytes(pool), keys_of(pool)
        assert programs.device_bytes(keys) == params_lib.nbytes(keys) / 8
        m = measure(program, plan.mesh, target)
        check(m.text, pool)
        assert m.aliased >= here, "the pool is written where it is"
        assert m.temporaries < here / 8
        assert m.cost.unknown_loops == 0, "the turns of each loop over runs are stated"
        is_kernel = any(f"%{kind}_attention" in m.text for kind in ("paged", "latent"))
        assert is_kernel == (cfg.indexer is None), "read by the kernel"


PODS = ("glm_5", "kimi_k2", "qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_4b")


def config_of(name):
    scope: dict = {}
    exec((Path(__file__).parents[2] / "configs" / "scale_up" / f"{name}.py").read_text(), scope)
    return scope["get_config"]()


def check_prefill(config):
    settings, target = read(config), chips.target(config.topology)
    plan = scale_up.plan_of(settings, target)
    prefill = plan.sampling(settings.rollout)[0]
    m = measure(prefill, plan.mesh, target)
    assert m.fits(0.05), m.reason(0.05)
    assert not copied(m.text, prefill.args[2])
    assert m.aliased >= programs.device_bytes(prefill.args[2])


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*PODS, "kimi_k2_experts", "qwen3_30b_a3b_experts", "qwen3_5_35b_a3b"]
)
def test_prompts_are_read_on_every_pod(name):
    """With five layers: of a mesh of experts and heads the TPU's compiler once ended the process,
    at any number of layers.
    """
    config = config_of(name)
    config.model.num_hidden_layers = 5
    check_prefill(config)
