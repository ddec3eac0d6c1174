"""Layers with a state against transformers' recurrence in float64: packed rows with parents, blocks
and steps of a cache, and how a config is read.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from mint_jax.errors import UserError
from mint_jax.models import config as config_lib
from mint_jax.models import delta, hf
from mint_jax.models.attention import Segments
from mint_jax.models.paged import EMPTY, FOLLOW, StateSlots
from tests import oracles

B, N, K, V, TAPS = 2, 3, 8, 5, 4


def rows(rng, T):
    """Segments of packed rows: prompts of any length, each with up to five children."""
    own, parent, number = [], [], 0
    while len(own) < T:
        prompt, n = number, int(rng.integers(1, 90))
        own, parent = own + [prompt] * n, parent + [prompt] * n
        for _ in range(rng.integers(0, 6)):
            number, n = number + 1, int(rng.integers(1, 70))
            own, parent = own + [number] * n, parent + [prompt] * n
        number += 1
    return own[:T], parent[:T]


def arguments(rng, T):
    q, k = rng.normal(size=(2, B, T, N, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(B, T, N, V)), rng.uniform(size=(B, T, N))
    decay = -rng.exponential(size=(B, T, N)) * rng.choice([0.01, 0.1, 3], size=(B, T, N))
    return q, k, v, decay, beta


def exact(q, k, v, decay, beta):
    """``o [T, N, V]`` of one sequence, from an empty state; float64."""
    args = (torch.tensor(x[None]) for x in (q * K**0.5, k, v, decay, beta))
    return torch_recurrent_gated_delta_rule(*args)[0][0].numpy()


def floats(arrays):
    return [jnp.asarray(x, jnp.float32) for x in arrays]


@pytest.mark.parametrize("T", [1, 63, 300])
def test_packed_rows_are_their_lineages_apart(rng, T):
    own, parent = (np.array(x, np.int32) for x in zip(*(rows(rng, T) for _ in range(B))))
    args, of = arguments(rng, T), delta.lineage(Segments(jnp.asarray(own), jnp.asarray(parent)))
    made = np.asarray(jax.jit(lambda *x: delta.delta_rule(*x, of))(*floats(args)))
    before = np.asarray(delta.previous(of, TAPS))
    for b in range(B):
        for segment in np.unique(own[b]):
            [mine] = np.where(own[b] == segment)
            [above] = np.where(own[b] == parent[b, mine[0]])
            ids = mine if above[0] == mine[0] else np.concatenate([above, mine])
            first = len(ids) - len(mine)
            want = exact(*(x[b, ids] for x in args))[first:]
            # float32 against float64; a chunk's triangular system has 64 rows of size 1
            np.testing.assert_allclose(made[b, mine], want, rtol=0, atol=2e-4)
            for i, token in enumerate(mine, first):
                ancestors = [ids[i - m] if i >= m else -1 for m in range(1, TAPS)]
                assert before[b, token].tolist() == ancestors


def test_gradients_are_those_of_the_recurrence(rng):
    T = 130
    args, g = arguments(rng, T), rng.normal(size=(B, T, N, V))
    one = delta.lineage(Segments(*(jnp.zeros((B, T), jnp.int32),) * 2))

    def loss(*x):
        return jnp.sum(delta.delta_rule(*x, one) * g)

    made = jax.grad(loss, argnums=range(5))(*floats(args))
    leaves = [torch.tensor(x, requires_grad=True) for x in args]
    q, *rest = leaves
    out, _ = torch_recurrent_gated_delta_rule(q * K**0.5, *rest)
    (out * torch.tensor(g)).sum().backward()
    for ours, theirs in zip(made, leaves, strict=True):
        want = theirs.grad.numpy()
        np.testing.assert_allclose(ours, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_blocks_in_any_calls_and_steps_are_the_recurrence(rng, bad):
    """A row's blocks in calls beside another row's, which is not finite: states pass from block to
    block, through slots between calls, and to single tokens.
    """
    T, P = 101, 32
    q, k, v, decay, beta = (x[0] for x in arguments(rng, T))
    want = exact(q, k, v, decay, beta)
    pool = jnp.full((1, 4, N, K, V), np.nan, jnp.float32)  # slots hold anything before

    def call(blocks, load, save, keep, pool):
        """Blocks ``[C]`` by number, -1 for a neighbour's."""
        take = [
            [np.full((P, *x.shape[1:]), bad) if b < 0 else x[b * P : (b + 1) * P] for b in blocks]
            for x in (q, k, v, decay, beta)
        ]
        count = [min(P, T - b * P) if b >= 0 else P for b in blocks]
        pad = [
            np.stack([np.pad(y, ((0, P - len(y)),) + ((0, 0),) * (y.ndim - 1)) for y in x])
            for x in take
        ]
        used = np.arange(P)[None] < np.array(count)[:, None]
        pad[3], pad[4] = (np.where(used[..., None], x, 0) for x in pad[3:])
        slots = StateSlots(*(jnp.asarray(x, jnp.int32) for x in (load, save, keep, count)))
        out, pool = delta._blocks(floats(pad), slots, pool, jnp.int32(0))
        return [np.asarray(o)[:n] for o, n in zip(out, count)], pool

    first, pool = call([0, 1, -1], [EMPTY, FOLLOW, EMPTY], [9, 2, 3], [0, 9, 9], pool)
    second, pool = call([-1, 2], [3, 2], [3, 2], [9, 9], pool)
    again, pool = call([1], [0], [1], [9], pool)
    # the snapshot after block 0 gives the bits that followed it
    assert again[0].tobytes() == first[1].tobytes()
    whole = np.concatenate([first[0], first[1], second[1]])
    np.testing.assert_allclose(whole, want[:96], rtol=0, atol=2e-4)
    state = pool[0, 2][None]
    for t in range(96, T):
        o, state = delta._step(*floats(x[t][None] for x in (q, k, v, decay, beta)), state)
        np.testing.assert_allclose(o[0], want[t], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_checkpoint_of_several_media_is_read_for_its_text(family, hf_dirs, tmp_path, mesh):
    """As published: nested ``text_config``, other names, experts of a layer in one tensor, tensors
    of pictures and of prediction.
    """
    source = hf_dirs(family)
    directory = shutil.copytree(source, tmp_path / "base")
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": family}
    outer |= {"text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(outer))
    tensors = oracles.torch_model(source).state_dict()  # experts fused
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: x
        for name, x in tensors.items()
    }
    renamed |= {
        "model.visual.patch_embed.proj.weight": torch.ones(2),
        "mtp.fc.weight": torch.ones(2),
    }
    safetensors.torch.save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    cfg = hf.read_model(directory)
    assert cfg.replace(directory=None) == hf.read_model(source).replace(directory=None)
    whole, plain = (hf.load(folder, cfg, mesh) for folder in (directory, source))
    jax.tree.map(np.testing.assert_array_equal, whole, plain)
    if family == "qwen3_5_moe":
        fused = hf.Checkpoint(directory).tensor("model.layers.1.mlp.experts.2.up_proj.weight")
        np.testing.assert_array_equal(fused[3:9, 1:], fused[:][3:9, 1:])
        bad = {n: x[:, 1:] if n.endswith(".gate_up_proj") else x for n, x in renamed.items()}
        bad = {n: x.contiguous() for n, x in bad.items()}
        safetensors.torch.save_file(bad, directory / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=r"expected experts, rows of gate_proj and up_proj"):
            hf.load(directory, cfg, mesh)
    outer.pop("text_config")
    with pytest.raises(UserError, match="has no text_config"):
        config_lib.from_hf(outer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "for each of 5 layers"),
        ({"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "sliding_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_key_heads 2 does not divide"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"linear_key_head_dim": "8"}, "linear_key_head_dim is '8'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "is 1.5"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, words, hf_dirs):
    config = json.loads((hf_dirs("qwen3_5") / "config.json").read_text())
    with pytest.raises(UserError, match=words):
        config_lib.from_hf(config | changes)


def test_layers_are_grouped_by_their_pattern():
    def groups(kinds):
        return [
            {n: list(r) for n, r in group.items()} for group in config_lib._groups(tuple(kinds))
        ]

    assert groups("aaa") == [{"a": [0, 1, 2]}]
    assert groups("aabbb") == [{"a": [0, 1]}, {"b": [2, 3, 4]}]
    assert groups("aabaabaab") == [{"a": [0, 3, 6], "a1": [1, 4, 7], "b": [2, 5, 8]}]
    assert groups("ababa") == [{"a": [0, 2], "b": [1, 3]}, {"a1": [4]}]
