"""Latent attention: adapters against PEFT, absorbed decoding against expanded rows, and a mesh
against one device.

Logits, gradients, caches and packed rows of its tiny models are compared with torch in
``transformer_test.py``.

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
from mint_jax.lora.view import attach_blocks
from mint_jax.models import mla, transformer
from mint_jax.models.config import Latent, ModelConfig, RopeScaling
from mint_jax.models.paged import PAGE
from tests.lora.peft_oracle_test import assert_as_under_peft, random_adapter
from tests.models.paged_test import continued

PROJECTIONS = ("q_a", "q_b", "kv_a", "kv_b", "o")
MIXED = (
    AdapterConfig(1, 2.0, ("kv_b",)),
    AdapterConfig(3, 5.0, PROJECTIONS, rslora=True),
    AdapterConfig(8, 16.0, PROJECTIONS),
)
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


@pytest.mark.parametrize(
    ("family", "configs"), [("deepseek_v3_dense", MIXED), ("moonlight_dense", NO_Q_LATENT)]
)
def test_adapters_of_every_projection_match_peft(family, configs, rng, tiny_base, hf_dirs):
    assert_as_under_peft(tiny_base(family), hf_dirs(family), configs, rng)


def test_targets_are_the_projections(tiny_base):
    for family, names in (
        ("deepseek_v3_dense", PROJECTIONS),
        ("glm_dense", ("q_a", "q_b", "kv_a", "kv_b", "o")),  # none of the indexer
        ("moonlight_dense", ("q", "kv_a", "kv_b", "o")),
    ):
        known = tree.target_paths(transformer.abstract(tiny_base(family).cfg))
        assert set(known) == {*names, "gate", "up", "down", "embed", "unembed"}


@functools.partial(jax.jit, static_argnames=("cfg",))
def _whole(params, lora, tokens_BT, *, cfg):
    positions = jnp.broadcast_to(
        jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape
    )
    h, _ = transformer.hidden_states(
        params, lora, transformer.DecoderInputs(tokens_BT, positions), cfg
    )
    return transformer.logits(params, lora, h)


def _slots(slots, prompts):
    """By rank bucket, the slot that each prompt names; the last prompt is the bare base's."""
    named = {slot.bucket: np.full(prompts, -1) for slot in slots.values()}
    for q, slot in enumerate(slots.values()):
        named[slot.bucket][q] = slot.index
    return named


@pytest.mark.long
def test_absorbed_decoding_of_many_adapters_equals_expanded_rows(rng, tiny_base):
    """Prompts of three policies and of the bare base, two rollouts each; one prompt reaches into a
    third page.
    """
    base, G, lengths, new = tiny_base("deepseek_v3_dense"), 2, (11, 70, 32, 20), 3
    specs = transformer.abstract(base.cfg)
    stacks, slots = tree.stack_adapters(
        specs, {str(c.rank): (c, random_adapter(rng, specs, c)) for c in MIXED}
    )
    lora = attach_blocks(
        stacks, {slot.bucket: np.array([slot.index]) for slot in slots.values()}, base_blocks=1
    )
    P = len(MIXED) + 1
    prompts = [rng.integers(97, size=n).astype(np.int32) for n in lengths]
    prompt_B, new_BT = np.arange(P).repeat(G), rng.integers(97, size=(P * G, new)).astype(np.int32)
    rows = [np.concatenate([prompts[q], new_BT[b]]) for b, q in enumerate(prompt_B)]
    # causal: what follows changes nothing
    padded = np.stack([np.pad(row, (0, max(lengths) + new - len(row))) for row in rows])
    whole, bare = (
        np.asarray(_whole(base.params, one, padded, cfg=base.cfg)) for one in (lora, None)
    )

    ours = continued(
        rng, base.params, base.cfg, prompts, prompt_B, new_BT, stacks, _slots(slots, P), alone=(2,)
    )
    shapes = {name: (leaf.shape[0], *leaf.shape[2:]) for name, leaf in ours.pool["dense"].items()}
    assert shapes == {"latent": (3, PAGE, 24), "rope": (3, PAGE, 8)}
    for b, q in enumerate(prompt_B):
        n = lengths[q]
        # float32, products in another order, logits of size 5
        np.testing.assert_allclose(ours.first[q], whole[b, :n], atol=1e-4)
        np.testing.assert_allclose(ours.rest[b], whole[b, n : n + new], atol=1e-4)
    assert np.abs(whole - bare)[:-G].max(axis=(1, 2)).min() > 1e-2, (
        "an adapter that does nothing says nothing"
    )


def test_the_scale_grows_with_the_temperature_of_yarn_over_all_dimensions():
    assert mla.scale(EVEN) == 20**-0.5
    plain = RopeScaling("yarn", factor=4.0, original_context=64)
    assert mla.scale(EVEN.replace(rope_scaling=plain)) == 20**-0.5
    tempered = RopeScaling("yarn", factor=4.0, original_context=64, mscale=1.0, mscale_all_dim=1.0)
    assert mla.scale(EVEN.replace(rope_scaling=tempered)) == pytest.approx(
        20**-0.5 * (0.1 * np.log(4) + 1) ** 2, rel=1e-12
    )


@pytest.mark.long
def test_a_mesh_of_eight_equals_one_device(rng, mesh, mesh8):
    """Rows with adapters, whole and through pages: over the mesh each row's latents are with one
    device.
    """
    specs, S, new = transformer.abstract(EVEN), 40, 2
    host = multihost.to_host(params_lib.init(specs, jax.random.key(int(rng.integers(2**31)))))
    configs = [AdapterConfig(2, targets=PROJECTIONS), AdapterConfig(3, targets=PROJECTIONS)]
    stacks, slots = tree.stack_adapters(
        specs, {str(c.rank): (c, random_adapter(rng, specs, c)) for c in configs}
    )
    prompts = list(rng.integers(96, size=(2, S)).astype(np.int32))
    prompt_B, new_BT = np.arange(8) // 4, rng.integers(96, size=(8, new)).astype(np.int32)
    tokens_BT = np.concatenate([np.stack(prompts)[prompt_B], new_BT], axis=1)
    results = []
    for devices, parts in ((mesh, 1), (mesh8, 8)):
        params = jax.device_put(host, sharding.shardings(specs, devices))
        with jax.set_mesh(devices):
            lora = attach_blocks(
                stacks, {slot.bucket: np.array([slot.index]) for slot in slots.values()}
            )
            whole = jax.device_get(_whole(params, lora, tokens_BT, cfg=EVEN))
            ours = continued(
                rng, params, EVEN, prompts, prompt_B, new_BT, stacks, _slots(slots, 2), parts
            )
            results.append(
                (whole, np.concatenate([np.stack(ours.first)[prompt_B], ours.rest], axis=1))
            )
    want = results[0][0]
    for got in jax.tree.leaves(results):
        # float32 sums, split over devices
        np.testing.assert_allclose(got, want, atol=1e-4 * max(1.0, np.abs(want).max()))
