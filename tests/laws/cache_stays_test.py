"""The cache stays where it is: a step of decoding neither copies it, nor turns it, nor sends it to another device.

Four key heads, or latents that all heads share, on a ``tensor`` axis of eight: heads cannot be split, so rows are, or positions.

Axes: L layers, Q prompts, G rollouts of a prompt, B = Q G rows, K kv heads, T prompt tokens, C new tokens.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import multihost, sharding
from mint_jax import params as params_lib
from mint_jax.aot import chips, hlo, programs
from mint_jax.aot.measure import measure
from mint_jax.lora.tree import AdapterConfig
from mint_jax.mesh import make_mesh, single_device_mesh
from mint_jax.models import transformer
from mint_jax.models.config import Latent, ModelConfig
from mint_jax.rollout import generate
from mint_jax.rollout.sample import SamplingParams

pytestmark = pytest.mark.bits

T, C = 512, 256
SIZES = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "d_ff": 64}
GROUPED = ModelConfig("qwen3", **SIZES, num_heads=16, num_kv_heads=4, head_dim=32, qk_norm=True)
LATENT = ModelConfig(
    "deepseek_v3", **SIZES, num_heads=8, num_kv_heads=8, head_dim=56, latent=Latent(q_latent=40, kv_latent=48, nope=16, rope=40, value=16)
)
FAMILIES = {"grouped": GROUPED, "latent": LATENT}
BATCHES = {  # Q, G: what the tensor axis splits of the prompts' part and of the new tokens'
    "rows": (16, 1),
    "positions, rows": (4, 4),
    "positions": (2, 2),
}
MOVES = ("copy", "transpose")
SENDS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast", "ragged-all-to-all")


def arrays(Q, G, cfg, rng):
    """Prompts, lengths, settings and limits of ``Q G`` rows that draw greedily."""
    B, row = Q * G, np.ones(Q * G, np.float32)
    sampling = SamplingParams(0 * row, np.zeros(B, np.int32), row, 0 * row, np.arange(B, dtype=np.uint32))
    limits = generate.Limits(np.full(B, C, np.int32), np.full((B, 1), -1, np.int32))
    prompts = rng.integers(0, cfg.vocab_size, (Q, T)).astype(np.int32)
    return prompts, rng.integers(T // 2, T, Q).astype(np.int32), sampling, limits


def large(text, least, ops):
    """Instructions of these kinds, in fusions too, that make or take an array of at least so many bytes."""
    module = hlo.Module(text)
    found = []
    for body in module.computations.values():
        for i in body:
            sizes = [hlo.nbytes(module.types[name]) for name in i.operands if name in module.types]
            if i.op in ops or (i.op.endswith("-start") and i.op.removesuffix("-start") in ops and i.op != "copy-start"):
                found += [f"{i.op} {i.type}"] if max([hlo.nbytes(i.type), *sizes]) >= least else []
    return found


def layer_bytes(cache):
    """Bytes of the smallest part of one layer's cache on each device."""
    return min(math.prod(x.sharding.shard_shape(x.shape)[1:]) * x.dtype.itemsize for x in jax.tree.leaves(cache))


# Two rows a device at least: for a lone one the CPU's product of matrices wants latents turned, layer by layer.
@pytest.mark.parametrize(
    ("family", "batch"),
    [
        pytest.param("grouped", "rows", marks=pytest.mark.long),
        pytest.param("grouped", "positions", marks=pytest.mark.long),
        ("grouped", "positions, rows"),
        pytest.param("latent", "positions, rows", marks=pytest.mark.long),
    ],
)
def test_eight_devices_decode_as_one_and_keep_their_part_of_the_cache(family, batch, rng):
    cfg, (Q, G) = FAMILIES[family], BATCHES[batch]
    specs = transformer.abstract(cfg)
    params = multihost.to_host(params_lib.init(specs, jax.random.key(7)))  # greedy: fixed, lest two logits be nearly equal
    prompts, lengths, sampling, limits = arrays(Q, G, cfg, np.random.default_rng(7))
    results = []
    for mesh in (single_device_mesh(), make_mesh({"tensor": 8})):
        args = jax.device_put(params, sharding.shardings(specs, mesh)), None
        with jax.set_mesh(mesh):
            cache, state, _ = generate.prefill(*args, prompts, lengths, sampling, limits, cfg=cfg, rollouts=G, new_tokens=C)
            for leaf in jax.tree.leaves((cache, state.cache)):
                assert leaf.size == mesh.size * leaf.addressable_shards[0].data.size, f"a device has more than its part of {leaf.shape}"
            least = layer_bytes((cache, state.cache))
            text = generate.decode.lower(*args, cache, lengths, state, sampling, limits, jnp.int32(9), cfg=cfg).compile().as_text()
            state = generate.decode(*args, cache, lengths, state, sampling, limits, jnp.int32(9), cfg=cfg)
            for leaf in jax.tree.leaves(state.cache):
                assert leaf.size == mesh.size * leaf.addressable_shards[0].data.size
        assert not large(text, least, MOVES)
        assert not large(text, least, SENDS)
        results.append(jax.device_get((state.tokens, state.logprobs, cache)))
    (tokens, *one), (tokens8, *eight) = results
    np.testing.assert_array_equal(tokens8, tokens)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, atol=1e-5 * max(1, np.abs(x).max())), one, eight)  # float32 sums in parts


POD = {"vocab_size": 1024, "d_model": 256, "num_layers": 2, "d_ff": 256}
LATENT_POD = Latent(q_latent=128, kv_latent=256, nope=64, rope=64, value=64)


@pytest.mark.parametrize(
    "cfg",
    [
        ModelConfig("qwen3", **POD, num_heads=16, num_kv_heads=4, head_dim=128),
        ModelConfig("qwen3", **POD, num_heads=16, num_kv_heads=8, head_dim=64),
        ModelConfig("deepseek_v3", **POD, num_heads=16, num_kv_heads=16, head_dim=128, latent=LATENT_POD),
    ],
    ids=["four heads", "eight narrow heads", "latents"],
)
def test_a_pod_decodes_without_moving_the_cache(cfg):
    """Eight TPU chips, ahead of time: heads, rows and widths whose tiles the compiler might want in another order."""
    target = chips.target("v5e:2x4")
    plan = programs.Plan(cfg, make_mesh({"tensor": 8}, list(target.devices)), jnp.bfloat16, AdapterConfig(4, targets=("o",)))
    decode = plan.sampling(programs.RolloutShape(adapters=2, prompts=16, rollouts=2, prompt_tokens=2048, new_tokens=2048))[1]
    cache = decode.args[2], decode.args[4].cache
    m = measure(decode, plan.mesh, target)
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert programs.device_bytes(cache) == whole / 8
    least = layer_bytes(cache)
    assert not large(m.text, least, MOVES)
    assert not large(m.text, least, SENDS)
    assert m.temporaries < programs.device_bytes(cache) / 2
