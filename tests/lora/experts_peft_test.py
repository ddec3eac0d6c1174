"""Adapters of routed experts, written expert by expert: PEFT loads them with our logits and our
gradients.
"""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers

from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.peft import CONFIG, WEIGHTS, read_peft, write_peft
from mint_jax.lora.tree import ALL_LINEAR, LINEAR_TARGETS, AdapterConfig, Projection
from mint_jax.models import hf, transformer
from tests import oracles
from tests.exchange import (
    assert_same_logits,
    edit_tensors,
    our_logits,
    peft_gradients,
    peft_model,
    random_adapter,
    tables,
    tokens_off_group_ties,
    tokens_off_ties,
)
from tests.views import view_of

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

E, F = 8, 40  # experts and their width in the tiny Qwen3-MoE
EXPORTS = {
    "all": AdapterConfig(3, 5.0, LINEAR_TARGETS),
    "rslora": AdapterConfig(3, 5.0, LINEAR_TARGETS, rslora=True),
    "router": AdapterConfig(2, 3.0, ("router", "gate", "up", "down")),
    "down": AdapterConfig(4, 2.0, ("down",)),
}


@pytest.mark.parametrize("config", EXPORTS.values(), ids=EXPORTS)
def test_peft_loads_what_we_write_and_reading_it_back_is_exact(
    config, rng, tiny_base, hf_dirs, tmp_path
):
    base, directory = tiny_base("qwen3_moe"), hf_dirs("qwen3_moe")
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    write_peft(tmp_path / "out", adapter, config, names, str(directory))
    model = peft_model(directory, tmp_path / "out")
    tokens_BT = tokens_off_ties(model, rng)
    bare = oracles.torch_logits(oracles.torch_model(directory), tokens_BT)
    assert_same_logits(
        our_logits(base, adapter, config, tokens_BT), oracles.torch_logits(model, tokens_BT), bare
    )
    back, read = read_peft(tmp_path / "out", names, shapes)
    assert read == AdapterConfig(config.rank, config.alpha, read.targets, config.rslora)
    assert set(read.targets) == set(config.targets)
    chex.assert_trees_all_equal(back, adapter)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3_dense", "glm_dense"])
def test_dense_layers_of_a_type_that_knows_experts_are_loaded_too(
    family, rslora, rng, tiny_base, hf_dirs, tmp_path
):
    """PEFT takes the names of MLPs for those of experts by the type of the model, and drops their
    factors without a word.
    """
    base, directory = tiny_base(family), hf_dirs(family)
    config = AdapterConfig(3, 5.0, ("o", "gate", "up", "down"), rslora)
    adapter, (names, shapes) = random_adapter(rng, base, config), tables(base)
    assert hf.is_moe_type(base.cfg)
    assert not hf.is_moe_type(tiny_base("llama").cfg)
    write_peft(tmp_path / "out", adapter, config, names, str(directory), hf.is_moe_type(base.cfg))
    model, tokens_BT = peft_model(directory, tmp_path / "out"), rng.integers(0, 97, (2, 9))
    bare = oracles.torch_logits(oracles.torch_model(directory), tokens_BT)
    assert_same_logits(
        our_logits(base, adapter, config, tokens_BT), oracles.torch_logits(model, tokens_BT), bare
    )
    back, read = read_peft(tmp_path / "out", names, shapes)
    assert read == AdapterConfig(config.rank, config.alpha, read.targets, config.rslora)
    jax.tree.map(np.testing.assert_array_equal, back, adapter)


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
    off_ties = (
        functools.partial(tokens_off_group_ties, experts=experts)
        if experts.groups > 1
        else tokens_off_ties
    )
    configs = [AdapterConfig(2, 6.0, (ALL_LINEAR,)), AdapterConfig(3, 4.0, (ALL_LINEAR,))]
    adapters, (names, _) = [random_adapter(rng, base, config) for config in configs], tables(base)
    models, tokens = [], []
    for i, config in enumerate(configs):
        write_peft(tmp_path / str(i), adapters[i], config, names)
        models.append(peft_model(directory, tmp_path / str(i), trainable=True))
        tokens.append(off_ties(models[-1], rng))
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


@pytest.fixture
def deepseek(rng):
    """A torch model with a dense first layer and shared experts, and the names and projections of
    some of its modules.
    """
    small = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    routed = {
        "n_routed_experts": E,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": F,
        "n_shared_experts": 2,
        "n_group": 1,
    }
    config = transformers.DeepseekV3Config(
        **small,
        **latent,
        **routed,
        topk_group=1,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        pad_token_id=None,
    )
    torch.manual_seed(int(rng.integers(2**31)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, p.shape[-1] ** -0.5)
    names, shapes = {}, {}
    sizes = {"gate": (48, 1), "up": (48, 1), "down": (1, 48)}  # 1 stands for the width of the kind
    for kind, (layers, middle, width) in {
        "dense/mlp": ([0], "mlp", 80),
        "moe/moe/shared": ([1, 2], "mlp.shared_experts", 2 * F),
        "moe/moe/experts": ([1, 2], "mlp.experts.{}", F),
    }.items():
        experts = range(E) if "{}" in middle else range(1)
        for last, (d_in, d_out) in sizes.items():
            names[f"{kind}/{last}"] = [
                f"model.layers.{i}.{middle.format(e)}.{last}_proj" for i in layers for e in experts
            ]
            stack = (len(layers), E) if "{}" in middle else (len(layers),)
            shapes[f"{kind}/{last}"] = Projection(
                stack, width if d_in == 1 else d_in, width if d_out == 1 else d_out, ()
            )
    names["moe/attn/o"], shapes["moe/attn/o"] = (
        [f"model.layers.{i}.self_attn.o_proj" for i in (1, 2)],
        Projection((2,), 64, 48, ()),
    )
    return model, names, shapes


@pytest.mark.parametrize("rslora", [False, True])
def test_dense_layers_and_shared_experts_beside_routed_ones_are_not_dropped(
    rslora, rng, deepseek, tmp_path
):
    """PEFT against the same adapter merged into the weights by hand."""
    model, names, shapes = deepseek
    config = AdapterConfig(3, 5.0, rslora=rslora)
    draw = lambda *shape: rng.normal(0, 0.5 * shape[-1] ** -0.5, shape).astype(np.float32)  # noqa: E731
    flat = {}
    for path, (stack, d_in, d_out, _) in shapes.items():
        flat |= {
            f"{path}/a": draw(*stack, config.rank, d_in),
            f"{path}/b": draw(*stack, config.rank, d_out),
        }
    adapter = params_lib.nest(flat)
    write_peft(tmp_path / "out", adapter, config, names)

    merged = {name: p.clone() for name, p in model.state_dict().items()}
    for path, modules in names.items():
        a, b = (flat[f"{path}/{factor}"].reshape(len(modules), config.rank, -1) for factor in "ab")
        for i, name in enumerate(modules):
            delta = torch.tensor(config.scale * b[i].T @ a[i])
            if ".experts." not in name:
                merged[f"{name}.weight"] += delta
                continue
            experts, e, last = name.rsplit(".", 2)
            if last == "down_proj":
                merged[f"{experts}.down_proj"][int(e)] += delta
            else:
                merged[f"{experts}.gate_up_proj"][int(e)][
                    slice(0, F) if last == "gate_proj" else slice(F, None)
                ] += delta
    tokens_BT = rng.integers(0, 97, (2, 9))
    bare, own = oracles.torch_logits(model, tokens_BT), dict(model.state_dict())
    own = {name: p.clone() for name, p in own.items()}
    model.load_state_dict(merged)
    expected = oracles.torch_logits(model, tokens_BT)
    model.load_state_dict(own)
    theirs = oracles.torch_logits(
        peft.PeftModel.from_pretrained(model, tmp_path / "out").eval(), tokens_BT
    )
    assert np.abs(expected - bare).max() > 1e-2
    # merging rounds every weight once more: float32 noise over 3 layers
    np.testing.assert_allclose(theirs, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    back, _ = read_peft(tmp_path / "out", names, shapes)
    chex.assert_trees_all_equal(back, adapter)


def test_dense_layers_and_shared_experts_that_peft_left_out_are_zero(rng, deepseek, tmp_path):
    """What PEFT makes of ``target_modules`` on such a model: only the routed experts have
    factors.
    """
    _, names, shapes = deepseek
    flat = {}
    for path, (stack, d_in, d_out, _) in shapes.items():
        if "experts" in path:
            flat |= {
                f"{path}/{f}": rng.normal(size=(*stack, 3, d)).astype(np.float32)
                for f, d in (("a", d_in), ("b", d_out))
            }
    write_peft(tmp_path / "out", params_lib.nest(flat), AdapterConfig(3), names)
    back = dict(params_lib.leaves_with_path(read_peft(tmp_path / "out", names, shapes)[0]))
    assert set(back) == {f"{path}/{f}" for path in names if not path.endswith("/o") for f in "ab"}
    for name, leaf in back.items():
        np.testing.assert_array_equal(leaf, flat.get(name, np.zeros_like(leaf)))


def test_experts_alone_are_named_as_modules(rng, tiny_base, tmp_path):
    """What older PEFT and other servers look for; parameters are named only where PEFT needs
    them.
    """
    base, config = tiny_base("qwen3_moe"), AdapterConfig(2)
    write_peft(tmp_path / "out", random_adapter(rng, base, config), config, tables(base)[0])
    fields = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert fields["target_modules"] == sorted(f"{name}_proj" for name in LINEAR_TARGETS)
    assert "target_parameters" not in fields
    assert "rank_pattern" not in fields


EXPERT3 = "base_model.model.model.layers.1.mlp.experts.3.up_proj"
SPOILT = {
    "an expert is missing": (
        lambda t: [t.pop(f"{EXPERT3}.lora_{f}.weight") for f in "AB"],
        (
            r"layers\.1\.mlp\.experts\.3\.up_proj is missing, but 7 of the 8 experts of its"
            r" layer are present: write all of them"
        ),
    ),
    "only A": (
        lambda t: t.pop(f"{EXPERT3}.lora_B.weight"),
        r"experts\.3\.up_proj has only one of lora_A and lora_B; the file is incomplete",
    ),
    "an expert too many": (
        lambda t: t.update(
            {f"{EXPERT3.replace('.3.', '.8.')}.lora_A.weight": t[f"{EXPERT3}.lora_A.weight"]}
        ),
        (
            r"experts\.8\.up_proj\.lora_A\.weight' is not a LoRA factor of this base: the adapter"
            r" was trained on another model"
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
