"""LoRA deltas against PEFT: logits and gradients of a mixed batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.lora import tree
from mint_jax.lora.tree import LINEAR_TARGETS, AdapterConfig
from mint_jax.lora.view import attach_blocks, taps_of
from mint_jax.models import transformer
from tests import oracles

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


@functools.partial(jax.jit, static_argnames=("cfg", "base_blocks"))
def logits_and_gradients(params, stacks, tokens_BT, pull_BTV, cfg, blocks, base_blocks):
    """Logits, and the gradient of ``sum(pull * logits)`` with respect to the blocks' factors."""

    def objective(taps):
        bound = attach_blocks(stacks, blocks, taps, base_blocks)
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        h, _ = transformer.hidden_states(
            params, bound, transformer.DecoderInputs(tokens_BT, positions), cfg
        )
        out = transformer.logits(params, bound, h)
        return jnp.sum(pull_BTV * out), out

    grads, out = jax.grad(objective, has_aux=True)(taps_of(stacks, blocks))
    return out, grads


LATENT = (
    AdapterConfig(1, 2.0, ("kv_b",)),
    AdapterConfig(3, 5.0, ("q_a", "q_b", "kv_a", "kv_b", "o"), rslora=True),
)
NO_Q_LATENT = (AdapterConfig(3, 5.0, ("q", "kv_a", "kv_b", "o")), AdapterConfig(2, 4.0, ("q", "o")))


@pytest.mark.parametrize(
    ("family", "configs"),
    [
        ("llama_bias", ALL_LINEAR),
        ("qwen3", MIXED),
        pytest.param("deepseek_v3_dense", LATENT, marks=pytest.mark.long),
        ("moonlight_dense", NO_Q_LATENT),
    ],
)
def test_logits_and_gradients_of_a_mixed_batch_match_peft_policy_by_policy(
    family, configs, rng, tiny_base, hf_dirs
):
    assert_as_under_peft(tiny_base(family), hf_dirs(family), configs, rng)


def assert_as_under_peft(base, directory, configs, rng, T=9):
    """One batch of random adapters, one per config, and of the bare base: logits and gradients of
    each are PEFT's.
    """
    specs, configs = transformer.abstract(base.cfg), sorted(configs, key=lambda c: c.bucket)
    adapters = {str(c.rank): (c, random_adapter(rng, specs, c)) for c in configs}
    stacks, slots = tree.stack_adapters(specs, adapters)
    rows = 2  # of each policy, and of the bare base at the end
    tokens_BT = rng.integers(0, base.cfg.vocab_size, ((len(configs) + 1) * rows, T))
    pull_BTV = rng.normal(size=(*tokens_BT.shape, base.cfg.vocab_size)).astype(np.float32)
    blocks = {b: jnp.arange(stack.slots) for b, stack in stacks.items()}
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
