"""LoRA deltas against PEFT: logits and gradients of a mixed batch, and the single functions against
float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.lora import tree
from mint_jax.lora.apply import BoundAdapters, batch_delta, embedding_delta, lora_delta
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.models import transformer
from tests import oracles

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

MODULES = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
MODULES |= {"q_a": "q_a_proj", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa", "kv_b": "kv_b_proj"}
MODULES |= {"embed": "embed_tokens", "unembed": "lm_head"}
ALL_LINEAR = (
    AdapterConfig(1, 2.0, LINEAR_TARGETS),
    AdapterConfig(3, 5.0, LINEAR_TARGETS, rslora=True),
    AdapterConfig(8, 16.0, LINEAR_TARGETS),
)
MIXED = (  # buckets 1, 4 and 8 with different targets: an empty one somewhere in every projection
    AdapterConfig(1, 0.5, ("embed", "gate", "unembed")),
    AdapterConfig(3, 7.0, ("q", "down", "embed")),
    AdapterConfig(8, 16.0, ("o", "unembed"), rslora=True),
)


def random_adapter(rng, specs, config):
    """Both factors random: a zero B would hide A, its gradient and the scale."""
    draw = lambda spec: rng.normal(0, 0.5 * spec.shape[-1] ** -0.5, spec.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, tree.adapter_specs(specs, config))


def factor_pairs(model, targets):
    """Path, layer, PEFT's A and B parameters."""
    for name, module in model.named_modules():
        short = next((s for s in targets if name.endswith(MODULES[s])), None)
        if short == "embed":
            yield "embed", 0, module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        elif short == "unembed":
            yield "unembed", 0, module.lora_A["default"].weight, module.lora_B["default"].weight
        elif short is not None:
            block = "mlp" if short in ("gate", "up", "down") else "attn"
            layer = int(name.split(".layers.")[1].split(".")[0])
            yield (
                f"dense/{block}/{short}",
                layer,
                module.lora_A["default"].weight,
                module.lora_B["default"].weight,
            )


def peft_model(directory, config, adapter):
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=[MODULES[t] for t in config.targets],
    )
    model = peft.get_peft_model(oracles.torch_model(directory), lora).eval()
    flat, seen = dict(params_lib.leaves_with_path(adapter)), 0
    with torch.no_grad():
        for path, layer, a, b in factor_pairs(model, config.targets):
            a.copy_(torch.tensor(flat[f"{path}/a"][layer]))
            b.copy_(torch.tensor(flat[f"{path}/b"][layer].T))
            seen += 1
    assert seen == sum(leaf.shape[0] for path, leaf in flat.items() if path.endswith("/a"))
    return model


@functools.partial(jax.jit, static_argnames=("cfg", "blocks", "base_blocks"))
def logits_and_gradients(params, stacks, tokens_BT, pull_BTV, cfg, blocks, base_blocks):
    """Logits, and the gradient of ``sum(pull * logits)`` with respect to the stacks' factors; a
    block is a row of its bucket.
    """

    def objective(factors):
        parts = [
            (tree.take_slots(factors[b], jnp.array(slots)), stacks[b].scale[jnp.array(slots)])
            for b, slots in blocks
        ]
        bound = tree.bind(parts, base_blocks)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        h, _ = transformer.hidden_states(
            params, bound, transformer.DecoderInputs(tokens_BT, positions), cfg
        )
        out = transformer.logits(params, bound, h)
        return jnp.sum(pull_BTV * out), out

    grads, out = jax.grad(objective, has_aux=True)({b: s.factors for b, s in stacks.items()})
    return out, grads


@pytest.mark.parametrize("configs", [ALL_LINEAR, MIXED], ids=["all_linear", "mixed_targets"])
@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_logits_and_gradients_of_a_mixed_batch_match_peft_policy_by_policy(
    family, configs, rng, tiny_base, hf_dirs
):
    assert_as_under_peft(tiny_base(family), hf_dirs(family), configs, rng)


def assert_as_under_peft(base, directory, configs, rng, T=9):
    """One batch of random adapters, one per config, and of the bare base: logits and gradients of
    each are PEFT's.
    """
    specs = transformer.abstract(base.cfg)
    adapters = {str(c.rank): (c, random_adapter(rng, specs, c)) for c in configs}
    stacks, slots = tree.stack_adapters(specs, adapters)
    rows = 2  # of each policy, and of the bare base at the end
    tokens_BT = rng.integers(0, base.cfg.vocab_size, ((len(configs) + 1) * rows, T))
    pull_BTV = rng.normal(size=(*tokens_BT.shape, base.cfg.vocab_size)).astype(np.float32)
    blocks = tuple((slot.bucket, (slot.index,)) for slot in slots.values())
    ours, grads = logits_and_gradients(
        base.params, stacks, tokens_BT, pull_BTV, base.cfg, blocks, 1
    )
    bare = oracles.torch_logits(oracles.torch_model(directory), tokens_BT)
    # Tolerances relative to the largest entry: float32 sums of 48 to 97 terms over 3 layers, in
    # another order than torch's.
    np.testing.assert_allclose(ours[-rows:], bare[-rows:], rtol=0, atol=5e-6 * np.abs(bare).max())
    for i, (config, adapter) in enumerate(adapters.values()):
        mine = slice(i * rows, (i + 1) * rows)
        model = peft_model(directory, config, adapter)
        theirs = model(torch.tensor(tokens_BT[mine])).logits
        (theirs * torch.tensor(pull_BTV[mine])).sum().backward()
        theirs = theirs.detach().numpy()
        np.testing.assert_allclose(ours[mine], theirs, rtol=0, atol=5e-6 * np.abs(theirs).max())
        assert np.abs(theirs - bare[mine]).max() > 1e-2, (
            "the adapter does nothing, so the comparison says nothing"
        )
        slot = slots[str(config.rank)]
        got = dict(
            params_lib.leaves_with_path(
                jax.tree.map(
                    lambda x, s=slot, c=config: x[:, s.index, : c.rank], grads[slot.bucket]
                )
            )
        )
        for path, layer, a, b in factor_pairs(model, config.targets):
            for leaf, expected in ((f"{path}/a", a.grad.numpy()), (f"{path}/b", b.grad.numpy().T)):
                np.testing.assert_allclose(
                    got[leaf][layer],
                    expected,
                    rtol=0,
                    atol=2e-5 * np.abs(expected).max() + 1e-6,
                    err_msg=leaf,
                )


def test_one_delta_is_the_product_in_float64(rng):
    x, a, b = rng.normal(size=(7, 20)), rng.normal(size=(3, 20)), rng.normal(size=(3, 11))
    got = lora_delta(*(jnp.asarray(z, jnp.float32) for z in (x, a, b)))
    # float32 sums of 20 and 3 terms of size about 5
    np.testing.assert_allclose(got, x @ a.T @ b, rtol=0, atol=1e-4)


def test_bfloat16_deltas_accumulate_in_float32(rng):
    D = 4096  # ones: a bfloat16 accumulator would stop at 256
    got = lora_delta(
        jnp.ones((2, D), jnp.bfloat16),
        jnp.ones((1, D), jnp.bfloat16),
        jnp.ones((1, 3), jnp.bfloat16),
    )
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), D)


def test_deltas_go_to_the_rows_of_their_own_block(rng):
    """Two buckets, two blocks in the first; the second bucket and the base blocks do not target
    this projection.
    """
    x_BTD = rng.normal(size=(8, 3, 5)).astype(np.float32)
    a_PRD, b_PRF = (
        rng.normal(size=(2, 4, 5)).astype(np.float32),
        rng.normal(size=(2, 4, 6)).astype(np.float32),
    )
    bound = BoundAdapters(
        ({"a": jnp.asarray(a_PRD), "b": jnp.asarray(b_PRF)}, {}), (2, 1), base_blocks=1
    )
    got = batch_delta(jnp.asarray(x_BTD), bound, 6)
    expected = np.zeros((8, 3, 6))
    for row in range(4):
        expected[row] = x_BTD[row].astype(np.float64) @ a_PRD[row // 2].T @ b_PRF[row // 2]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)  # float32 sums of 5 and 4 terms
    assert not np.any(np.asarray(got)[4:])


def test_embedding_deltas_are_rows_of_a_times_b(rng):
    tokens_BT = rng.integers(0, 13, (4, 3))
    a_PRV, b_PRF = (
        rng.normal(size=(2, 4, 13)).astype(np.float32),
        rng.normal(size=(2, 4, 6)).astype(np.float32),
    )
    bound = BoundAdapters(({"a": jnp.asarray(a_PRV), "b": jnp.asarray(b_PRF)},), (2,))
    got = embedding_delta(jnp.asarray(tokens_BT), bound, 6, jnp.float32)
    one_hot_BTV = np.eye(13)[tokens_BT]
    expected = np.stack([one_hot_BTV[r] @ a_PRV[r // 2].T @ b_PRF[r // 2] for r in range(4)])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)  # float32 sums of 4 terms


def test_a_projection_nobody_targets_has_no_delta():
    bound = BoundAdapters(({"other": {"a": 0, "b": 0}}, {}), (1, 1), base_blocks=1)
    assert batch_delta(jnp.ones((3, 2, 5)), bound.at("q"), 6) is None
    assert bound.targeted
    assert not bound.at("q").targeted
    assert bound.total_blocks == 3
    assert bound.block_of_rows(6).tolist() == [0, 0, 1, 1, 2, 2]


def test_rows_that_do_not_fall_into_equal_blocks_are_refused():
    factors = {"a": jnp.ones((2, 1, 5)), "b": jnp.ones((2, 1, 6))}
    with pytest.raises(ValueError, match="5 rows do not divide into 3 equal blocks"):
        batch_delta(jnp.ones((5, 2, 5)), BoundAdapters((factors,), (2,), base_blocks=1), 6)
    with pytest.raises(ValueError, match="5 rows do not divide into 3 equal blocks"):
        BoundAdapters((factors,), (2,), base_blocks=1).block_of_rows(5)
