"""Sparse attention: the indexer's choice and what follows from it, against transformers; packed rows, caches, a mesh.

Scores of two keys may be so near that float32 orders them either way: tokens are drawn again until none are.

Axes: B rows, T tokens, S keys, Q prompts, G rollouts of a prompt.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax import multihost, sharding
from mint_jax.lora import tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import attention, dsa, hf, mla, transformer
from mint_jax.models.attention import Segments, unpack_keys
from tests import oracles
from tests.lora.apply_test import peft_model, random_adapter

FAMILIES = ("deepseek_v32_dense", "glm_dense")
B, T, TOPK = 2, 24, 8


def _scores_under_torch(model, tokens_BT, monkeypatch):
    """Logits, and the masked scores ``[B, T, T]`` of every indexer that runs."""
    seen, topk = [], torch.Tensor.topk

    def record(self, *args, **kwargs):
        seen.append(self.detach().clone())
        return topk(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", record)
        logits = oracles.torch_logits(model, tokens_BT)
    return logits, seen


def _clear_tokens(rng, model, monkeypatch, shape=(B, T), shared=0):
    """Tokens, the first ``shared`` the same in all rows, logits and scores; the last key chosen is well above the next."""
    for _ in range(200):
        tokens_BT = rng.integers(3, 97, size=shape).astype(np.int32)
        tokens_BT[:, :shared] = tokens_BT[:1, :shared]
        logits, scores = _scores_under_torch(model, tokens_BT, monkeypatch)
        best = torch.stack(scores).sort(-1, descending=True).values[:, :, TOPK:]
        if (best[..., TOPK - 1] - best[..., TOPK]).min() > 1e-4:  # errors are of size 1e-6
            return tokens_BT, logits, scores
    raise AssertionError("scores are ties throughout")


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def _run(params, lora, tokens_BT, positions_BT, segments=None, cache=None, lengths=None, *, cfg, remat="none"):
    inputs = transformer.Inputs(tokens_BT, positions_BT, segments, cache, lengths)
    h, kept = transformer.hidden_states(params, lora, inputs, cfg, keep_kv=True, remat=remat)
    return transformer.logits(params, lora, h), kept


def _arange(tokens, start=0):
    return np.broadcast_to(np.asarray(start) + np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_choices_equal_transformers(family, rng, tiny_base, hf_dirs, monkeypatch):
    base, made = tiny_base(family), []
    tokens_BT, theirs, scores = _clear_tokens(rng, oracles.torch_model(hf_dirs(family)), monkeypatch)
    select = dsa.select

    def watched(*args):
        chosen, keys = select(*args)
        jax.debug.callback(lambda bits: made.append(np.asarray(bits)), chosen[0], ordered=True)
        return chosen, keys

    monkeypatch.setattr(mla.dsa, "select", watched)
    h, kept = jax.jit(transformer.hidden_states, static_argnames=("cfg", "keep_kv"))(
        base.params, None, transformer.Inputs(tokens_BT, _arange(tokens_BT)), cfg=base.cfg, keep_kv=True
    )
    jax.effects_barrier()
    np.testing.assert_allclose(transformer.logits(base.params, None, h), theirs, atol=2e-4)  # float32 sums in another order
    full = base.cfg.indexer.full
    assert [s.shape for s in scores] == [(B, T, T)] * sum(full)
    assert len(made) == len(full)
    nth = -1
    for layer, bits in enumerate(made):
        nth += full[layer]
        top = scores[nth].topk(TOPK, dim=-1).indices.numpy()
        want = np.zeros((B, T, T), bool)
        np.put_along_axis(want, top, True, axis=-1)
        ours = np.asarray(unpack_keys(jnp.asarray(bits), T))
        np.testing.assert_array_equal(ours[:, TOPK:], want[:, TOPK:], err_msg=f"layer {layer}")
        assert ours[:, :TOPK][:, np.tri(TOPK, T, dtype=bool)].all()  # as few keys as that are all chosen
        np.testing.assert_array_equal(np.any(kept["dense"]["index"][layer]), full[layer])


def test_as_many_keys_as_topk_are_plain_latent_attention(rng, tiny_base):
    base = tiny_base("glm_dense")
    plain = base.cfg.replace(indexer=None)
    tokens_BT = rng.integers(97, size=(B, TOPK + 1)).astype(np.int32)
    for length, same in ((TOPK, True), (TOPK + 1, False)):
        tokens = tokens_BT[:, :length]
        ours, want = (_run(base.params, None, tokens, _arange(tokens), cfg=cfg)[0] for cfg in (base.cfg, plain))
        assert np.array_equal(ours, want) == same


def test_slices_of_queries_and_heads_change_nothing(rng, monkeypatch):
    q, w, k = (rng.normal(size=s).astype(np.float32) for s in ((B, T, 6, 10), (B, T, 6), (B, T, 10)))
    segments = Segments(*(np.sort(rng.integers(0, 2, (B, T)), axis=1).astype(np.int32),) * 2)
    past = rng.normal(size=(1, 9, 10)).astype(np.float32)

    def both():
        packed = dsa._choose_packed(jnp.asarray(q), jnp.asarray(w), jnp.asarray(k), segments, TOPK)
        return packed, *dsa._choose_cached(jnp.asarray(q), jnp.asarray(w), [past, k], (jnp.int32(7),), TOPK)

    whole = both()
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * B * T * T * 2)
    for ours, want in zip(both(), whole, strict=True):
        np.testing.assert_array_equal(ours, want)
    counts = np.concatenate([np.asarray(unpack_keys(bits, S)) for bits, S in zip(whole[1:], (9, T))], axis=-1).sum(-1)
    assert (counts[:, 1:] >= TOPK).all()  # 7 cached keys and the token's own
    assert np.mean(counts[:, 1:] == TOPK) > 0.9  # where all heads of several keys score 0, they tie and are all chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_rows_apart(family, rng, tiny_base, hf_dirs, monkeypatch):
    """A prompt, two rollouts that see it, and an unrelated text."""
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    P, n, other = 11, 9, 20
    rollouts, want, _ = _clear_tokens(rng, model, monkeypatch, (2, P + n), shared=P)
    text, alone, _ = _clear_tokens(rng, model, monkeypatch, (1, other))
    tokens = np.concatenate([rollouts[0], rollouts[1, P:], text[0]])[None]
    own = np.repeat(np.arange(4), (P, n, n, other))[None].astype(np.int32)
    positions = np.concatenate([np.arange(P), P + np.arange(n), P + np.arange(n), np.arange(other)])[None].astype(np.int32)
    ours, _ = _run(base.params, None, tokens, positions, Segments(own, np.where(own < 3, 0, own)), cfg=base.cfg)
    np.testing.assert_allclose(ours[0], np.concatenate([want[0], want[1, P:], alone[0]]), atol=2e-4)  # float32, other orders


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_cache_equals_the_full_forward(family, rng, tiny_base, hf_dirs, monkeypatch):
    """Two padded prompts, two rollouts each; four new tokens at once, then one with both parts of the cache."""
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    lengths, G, new = np.array([19, 13], np.int32), 2, 5
    drawn = [_clear_tokens(rng, model, monkeypatch, (G, n + new), shared=n) for n in lengths]
    prompts_QS = np.stack([np.pad(rows[0][0, :n], (0, max(lengths) - n)) for rows, n in zip(drawn, lengths)]).astype(np.int32)
    new_BT, theirs = (np.concatenate([rows[i][:, -new:] for rows in drawn]) for i in (0, 1))
    at = np.repeat(lengths, G)[:, None]
    _, prompt = _run(base.params, None, prompts_QS, _arange(prompts_QS), cfg=base.cfg)
    part = jax.tree.map(lambda x: (x,), prompt)
    four, own = _run(base.params, None, new_BT[:, :4], _arange(new_BT[:, :4], at), None, part, (lengths,), cfg=base.cfg)
    both = jax.tree.map(lambda x, y: (x, jnp.pad(y, ((0, 0), (0, 0), (0, 3), (0, 0)))), prompt, own)
    last, _ = _run(base.params, None, new_BT[:, 4:], at + 4, None, both, (lengths, jnp.int32(4)), cfg=base.cfg)
    np.testing.assert_allclose(np.concatenate([four, last], axis=1), theirs, atol=2e-4)  # float32 sums in another order


@pytest.mark.parametrize(("family", "remat"), [("deepseek_v32_dense", "none"), ("glm_dense", "names"), ("glm_dense", "full")])
def test_gradients_equal_torch_and_indexers_get_none(family, remat, rng, tiny_base, hf_dirs, monkeypatch):
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    tokens_BT, _, _ = _clear_tokens(rng, model, monkeypatch)
    g_BTV = rng.normal(size=(B, T, 97)).astype(np.float32)
    (model(torch.tensor(tokens_BT, dtype=torch.long)).logits * torch.tensor(g_BTV)).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    loss = lambda params: jnp.sum(_run(params, None, tokens_BT, _arange(tokens_BT), cfg=base.cfg, remat=remat)[0] * g_BTV)  # noqa: E731
    for name, ours in hf.tensors(jax.grad(loss)(base.params), base.cfg):
        if ".indexer." in name:
            assert theirs.pop(name) is None
            assert not np.any(ours)
        else:
            want = theirs.pop(name).numpy()
            np.testing.assert_allclose(ours, want, atol=1e-4 * np.abs(want).max(), err_msg=name)  # float32 sums over tokens
    assert not theirs


def test_adapters_cannot_target_the_indexer(tiny_base):
    known = tree.target_paths(transformer.abstract(tiny_base("glm_dense").cfg))
    assert set(known) == {"q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "down", "embed", "unembed"}


def test_decoding_under_an_adapter_equals_peft(rng, tiny_base, hf_dirs, monkeypatch):
    """What an adapter does to the residual stream and to the query's latent moves the choice as well."""
    base, config = tiny_base("glm_dense"), AdapterConfig(3, 9.0, ("q_a", "q_b", "kv_a", "kv_b", "o"))
    specs = transformer.abstract(base.cfg)
    adapter = random_adapter(rng, specs, config)
    model = peft_model(hf_dirs("glm_dense"), config, adapter)
    tokens_BT, theirs, _ = _clear_tokens(rng, model, monkeypatch)
    stacks, _ = tree.stack_adapters(specs, {"one": (config, adapter)})
    lora, P = tree.bind_slots(stacks, {4: np.array([0])}), T - 3
    head, prompt = _run(base.params, lora, tokens_BT[:, :P], _arange(tokens_BT[:, :P]), cfg=base.cfg)
    part = jax.tree.map(lambda x: (x,), prompt)
    tail, _ = _run(base.params, lora, tokens_BT[:, P:], _arange(tokens_BT[:, P:], P), None, part, (jnp.int32(P),), cfg=base.cfg)
    np.testing.assert_allclose(np.concatenate([head, tail], axis=1), theirs, atol=2e-4)  # float32 sums in another order


def test_a_mesh_of_eight_equals_one_device(rng, tiny_base, hf_dirs, mesh, mesh8, monkeypatch):
    cfg = tiny_base("glm_dense").cfg.replace(vocab_size=98)
    specs = transformer.abstract(cfg)
    tokens_BT, _, _ = _clear_tokens(rng, oracles.torch_model(hf_dirs("glm_dense")), monkeypatch, (8, T))
    host = multihost.to_host(tiny_base("glm_dense").params)
    for table in ("embed", "unembed"):
        host[table]["w"] = np.pad(host[table]["w"], ((0, 1), (0, 0)))  # an even vocabulary
    results = []
    for devices in (mesh, mesh8):
        params = jax.device_put(host, sharding.shardings(specs, devices))
        with jax.set_mesh(devices):
            results.append(jax.device_get(_run(params, None, tokens_BT, _arange(tokens_BT), cfg=cfg)))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-4 * max(1.0, np.abs(x).max()))  # float32 sums, split over devices


def test_layers_of_multi_token_prediction_are_left_unread(tiny_base, hf_dirs, tmp_path, mesh, caplog):
    base = tiny_base("glm_dense")
    fewer = base.cfg.replace(num_layers=2, dense_layers=2)
    fewer = fewer.replace(indexer=type(fewer.indexer)(**(vars(fewer.indexer) | {"full": fewer.indexer.full[:2]})))
    params = hf.load(hf_dirs("glm_dense"), fewer, mesh)
    assert params["dense"]["attn"]["o"]["w"].shape[0] == 2
    third = [name for name in hf.Checkpoint(hf_dirs("glm_dense")).files if name.startswith("model.layers.2.")]
    (record,) = caplog.records
    assert f"{len(third)} tensors of layers after the last" in record.getMessage()
    caplog.clear()
    hf.load(hf_dirs("glm_dense"), base.cfg, mesh)
    assert not caplog.records
