"""Adapters of routed experts, written expert by expert: PEFT loads them with our logits and our
gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.peft import WEIGHTS, read_peft, write_peft
from mint_jax.lora.tree import ALL_LINEAR, AdapterConfig
from mint_jax.models import transformer
from tests import oracles
from tests.exchange import (
    assert_same_logits,
    decided_tokens,
    edit_tensors,
    peft_gradients,
    peft_model,
    random_adapter,
    tables,
)
from tests.views import view_of


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.long)]
)
def test_two_adapters_in_one_batch_have_the_logits_and_gradients_that_peft_gives_each(
    family, rng, tiny_base, hf_dirs, tmp_path
):
    """DeepSeek-V3: latent attention, a dense layer, experts chosen group by group, and shared
    ones.
    """
    base, directory = tiny_base(family), hf_dirs(family)
    experts = base.cfg.experts
    configs = [AdapterConfig(2, 6.0, (ALL_LINEAR,)), AdapterConfig(3, 4.0, (ALL_LINEAR,))]
    adapters, (names, _) = [random_adapter(rng, base, config) for config in configs], tables(base)
    models, tokens = [], []
    for i, config in enumerate(configs):
        write_peft(tmp_path / str(i), adapters[i], config, names)
        models.append(peft_model(directory, tmp_path / str(i), trainable=True))
        tokens.append(decided_tokens(models[-1], base.cfg, rng))
    tokens_BT = np.concatenate(tokens)
    weight_BTV = rng.normal(size=(*tokens_BT.shape, 97)).astype(np.float32)

    @jax.jit
    def loss(adapters):
        parts = [
            (jax.tree.map(lambda x: x[:, None], a), jnp.array([c.scale]))
            for a, c in zip(adapters, configs)
        ]
        positions = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        bound = view_of(parts)
        h = transformer.hidden_states(
            base.params,
            bound,
            transformer.DecoderInputs(jnp.asarray(tokens_BT), positions),
            base.cfg,
        )[0]
        logits = transformer.logits(base.params, bound, h)
        return jnp.sum(logits * weight_BTV), logits

    bare = oracles.torch_logits(oracles.torch_model(directory), tokens_BT)
    grads, logits_BTV = jax.grad(loss, has_aux=True)(
        [jax.tree.map(jnp.asarray, a) for a in adapters]
    )
    for i, ours in enumerate(grads):
        mine = slice(2 * i, 2 * i + 2)
        logits = models[i](torch.tensor(tokens[i])).logits
        assert_same_logits(logits_BTV[mine], logits.detach().numpy(), bare[mine])
        (logits * torch.tensor(weight_BTV[mine])).sum().backward()
        theirs = peft_gradients(models[i], names, configs[i].rank, experts.count, experts.width)
        paths = [path for path, _ in params_lib.leaves_with_path(ours)]
        assert {path[:-2] for path in paths} == set(names) - {"embed", "unembed", "moe/moe/router"}
        for path, leaf in params_lib.leaves_with_path(ours):
            expected = theirs[path].reshape(leaf.shape)
            assert np.abs(expected).max() > 1e-2
            # float32 sums over 18 tokens and 3 layers in another order than torch's, relative to
            # the leaf's largest entry
            np.testing.assert_allclose(
                leaf, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), err_msg=path
            )


EXPERT3 = "base_model.model.model.layers.1.mlp.experts.3.up_proj"
SPOILT = {
    "an expert is missing": (
        lambda t: [t.pop(f"{EXPERT3}.lora_{f}.weight") for f in "AB"],
        (
            r"layers\.1\.mlp\.experts\.3\.up_proj is missing, but 7 of the 8 experts of its"
            r" layer are present: write all of them"
        ),
    ),
    "another width": (
        lambda t: t.update({f"{EXPERT3}.lora_A.weight": np.ones((2, 47), np.float32)}),
        (
            r"experts\.3\.up_proj has lora_A \(2, 47\) and lora_B \(40, 2\); this base needs \(2,"
            r" 48\) and \(40, 2\)"
        ),
    ),
}


@pytest.mark.parametrize(("change", "message"), SPOILT.values(), ids=SPOILT)
def test_files_with_other_experts_are_refused(change, message, rng, tiny_base, tmp_path):
    base, config = tiny_base("qwen3_moe"), AdapterConfig(2, targets=("gate", "up", "down"))
    names, shapes = tables(base)
    write_peft(tmp_path / "out", random_adapter(rng, base, config), config, names)
    assert (tmp_path / "out" / WEIGHTS).is_file()
    edit_tensors(tmp_path / "out", change)
    with pytest.raises(UserError, match=message):
        read_peft(tmp_path / "out", names, shapes)
