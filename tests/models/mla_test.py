"""Latent attention: adapters against PEFT, absorbed decoding against expanded rows, and a mesh against one device.

Logits, gradients, caches and packed rows of its tiny models are compared with torch in ``transformer_test.py``.

Axes: B rows, T tokens, P prompts of one policy each, G rollouts of a prompt.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mint_jax import multihost, sharding
from mint_jax import params as params_lib
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import mla, transformer
from mint_jax.models.config import Latent, ModelConfig, RopeScaling
from tests.lora.apply_test import assert_as_under_peft, random_adapter

PROJECTIONS = ("q_a", "q_b", "kv_a", "kv_b", "o")
MIXED = (AdapterConfig(1, 2.0, ("kv_b",)), AdapterConfig(3, 5.0, PROJECTIONS, rslora=True), AdapterConfig(8, 16.0, PROJECTIONS))
NO_Q_LATENT = (AdapterConfig(3, 5.0, ("q", "kv_a", "kv_b", "o")), AdapterConfig(2, 4.0, ("q", "o")))
EVEN = ModelConfig(
    "deepseek_v3",
    vocab_size=96,
    d_model=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=20,
    d_ff=80,
    latent=Latent(q_latent=40, kv_latent=24, nope=12, rope=8, value=10),
)


@pytest.mark.parametrize(("family", "configs"), [("deepseek_v3_dense", MIXED), ("moonlight_dense", NO_Q_LATENT)])
def test_adapters_of_every_projection_match_peft(family, configs, rng, tiny_base, hf_dirs):
    assert_as_under_peft(tiny_base(family), hf_dirs(family), configs, rng)


def test_targets_are_the_projections(tiny_base):
    for family, names in (("deepseek_v3_dense", PROJECTIONS), ("moonlight_dense", ("q", "kv_a", "kv_b", "o"))):
        known = tree.target_paths(transformer.abstract(tiny_base(family).cfg))
        assert set(known) == {*names, "gate", "up", "down", "embed", "unembed"}


@functools.partial(jax.jit, static_argnames=("cfg",))
def _run(params, lora, tokens_BT, start_B, cache, lengths, *, cfg):
    positions = start_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    h, kept = transformer.hidden_states(
        params, lora, transformer.Inputs(tokens_BT, positions, cache=cache, lengths=lengths), cfg, keep_kv=True
    )
    return transformer.logits(params, lora, h), kept


def test_absorbed_decoding_of_many_adapters_equals_expanded_rows(rng, tiny_base):
    """Prompts of three policies and of the bare base, two rollouts each; new tokens two at a time, then one."""
    base, G, S, new = tiny_base("deepseek_v3_dense"), 2, 11, 3
    specs = transformer.abstract(base.cfg)
    stacks, slots = tree.stack_adapters(specs, {str(c.rank): (c, random_adapter(rng, specs, c)) for c in MIXED})
    lora = tree.bind_slots(stacks, {slot.bucket: np.array([slot.index]) for slot in slots.values()}, base_blocks=1)
    P = len(MIXED) + 1
    prompts_PS = rng.integers(97, size=(P, S)).astype(np.int32)
    new_BT = rng.integers(97, size=(P * G, new)).astype(np.int32)
    whole, _ = _run(base.params, lora, np.concatenate([prompts_PS.repeat(G, 0), new_BT], 1), np.zeros(P * G, int), None, None, cfg=base.cfg)
    bare, _ = _run(base.params, None, np.concatenate([prompts_PS.repeat(G, 0), new_BT], 1), np.zeros(P * G, int), None, None, cfg=base.cfg)

    first, prompt = _run(base.params, lora, prompts_PS, np.zeros(P, int), None, None, cfg=base.cfg)
    assert {name: leaf.shape for name, leaf in prompt["dense"].items()} == {"latent": (3, P, S, 24), "rope": (3, P, S, 8)}
    at, lengths = np.full(P * G, S), np.full(P, S, np.int32)
    two, own = _run(base.params, lora, new_BT[:, :2], at, jax.tree.map(lambda x: (x,), prompt), (lengths,), cfg=base.cfg)
    both = jax.tree.map(lambda x, y: (x, jnp.pad(y, ((0, 0), (0, 0), (0, 3), (0, 0)))), prompt, own)
    last, _ = _run(base.params, lora, new_BT[:, 2:], at + 2, both, (lengths, jnp.int32(2)), cfg=base.cfg)
    got = np.concatenate([first.repeat(G, 0), two, last], axis=1)
    np.testing.assert_allclose(got, whole, atol=1e-4)  # float32, products in another order, logits of size 5
    assert np.abs(whole - bare)[:-G].max(axis=(1, 2)).min() > 1e-2, "an adapter that does nothing says nothing"


def test_the_scale_grows_with_the_temperature_of_yarn_over_all_dimensions():
    assert mla.scale(EVEN) == 20**-0.5
    plain = RopeScaling("yarn", factor=4.0, original_context=64)
    assert mla.scale(EVEN.replace(rope_scaling=plain)) == 20**-0.5
    tempered = RopeScaling("yarn", factor=4.0, original_context=64, mscale=1.0, mscale_all_dim=1.0)
    assert mla.scale(EVEN.replace(rope_scaling=tempered)) == pytest.approx(20**-0.5 * (0.1 * np.log(4) + 1) ** 2, rel=1e-12)


@pytest.mark.long
def test_a_mesh_of_eight_equals_one_device(rng, mesh, mesh8):
    """Rows with adapters, and a token more with their latents cached."""
    specs, S = transformer.abstract(EVEN), 12
    host = multihost.to_host(params_lib.init(specs, jax.random.key(int(rng.integers(2**31)))))
    configs = [AdapterConfig(2, targets=PROJECTIONS), AdapterConfig(3, targets=PROJECTIONS)]
    stacks, slots = tree.stack_adapters(specs, {str(c.rank): (c, random_adapter(rng, specs, c)) for c in configs})
    tokens_BT = rng.integers(96, size=(8, S + 1)).astype(np.int32)
    results = []
    for devices in (mesh, mesh8):
        params = jax.device_put(host, sharding.shardings(specs, devices))
        with jax.set_mesh(devices):
            lora = tree.bind_slots(stacks, {slot.bucket: np.array([slot.index]) for slot in slots.values()})
            whole, kept = _run(params, lora, tokens_BT[:, :S], np.zeros(8, int), None, None, cfg=EVEN)
            cache = jax.tree.map(lambda x: (x,), kept)
            last, _ = _run(params, lora, tokens_BT[:, S:], np.full(8, S), cache, (jnp.int32(S),), cfg=EVEN)
            results.append(jax.device_get((whole, last)))
    for x, y in zip(*results):
        np.testing.assert_allclose(y, x, atol=1e-4 * max(1.0, np.abs(x).max()))  # float32 sums, split over devices
