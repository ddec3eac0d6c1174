"""Sparse attention: the indexer's choice and what follows from it, against transformers; packed
rows, caches, a mesh.

Scores of two keys may be so near that float32 orders them either way: tokens are drawn again until
none are.

Axes: B rows, T tokens, S keys, Q prompts, G rollouts of a prompt.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.lora import tree
from mint_jax.lora.peft import write_peft
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import hf, transformer
from mint_jax.models.attention import Segments
from tests import oracles
from tests.adapters import random_adapter
from tests.exchange import decoder_logits, peft_model, tables
from tests.models.paged_test import continued

FAMILIES = ("deepseek_v32_dense", "glm_dense")
B, T, TOPK = 2, 24, 8


def _scores_under_torch(model, tokens_BT):
    """Logits, and the masked scores ``[B, T, T]`` of every indexer that runs."""
    with oracles.watched_topk() as seen:
        logits = oracles.torch_logits(model, tokens_BT)
    return logits, [scores for scores, _ in seen]


def _clear_tokens(rng, model, shape=(B, T), shared=0):
    """Tokens, the first ``shared`` the same in all rows, logits and scores; the last key chosen is
    well above the next.
    """
    for _ in range(200):
        tokens_BT = rng.integers(3, 97, size=shape).astype(np.int32)
        tokens_BT[:, :shared] = tokens_BT[:1, :shared]
        logits, scores = _scores_under_torch(model, tokens_BT)
        best = torch.stack(scores).sort(-1, descending=True).values[:, :, TOPK:]
        if (best[..., TOPK - 1] - best[..., TOPK]).min() > 1e-4:  # errors are of size 1e-6
            return tokens_BT, logits, scores
    raise AssertionError("scores are ties throughout")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, rng, tiny_base, hf_dirs):
    """With 24 keys of which 8 are chosen, another choice is another result."""
    base = tiny_base(family)
    tokens_BT, theirs, scores = _clear_tokens(rng, oracles.torch_model(hf_dirs(family)))
    assert [s.shape for s in scores] == [(B, T, T)] * sum(base.cfg.indexer.full)
    ours = decoder_logits(base.params, None, tokens_BT, cfg=base.cfg)
    np.testing.assert_allclose(ours, theirs, atol=2e-4)  # float32 sums in another order


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_rows_apart(family, rng, tiny_base, hf_dirs):
    """A prompt, two rollouts that see it, and an unrelated text."""
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    P, n, other = 11, 9, 20
    rollouts, want, _ = _clear_tokens(rng, model, (2, P + n), shared=P)
    text, alone, _ = _clear_tokens(rng, model, (1, other))
    tokens = np.concatenate([rollouts[0], rollouts[1, P:], text[0]])[None]
    own = np.repeat(np.arange(4), (P, n, n, other))[None].astype(np.int32)
    positions = np.concatenate(
        [np.arange(P), P + np.arange(n), P + np.arange(n), np.arange(other)]
    )[None].astype(np.int32)
    ours = decoder_logits(
        base.params, None, tokens, positions, Segments(own, np.where(own < 3, 0, own)), cfg=base.cfg
    )
    # float32, other orders
    np.testing.assert_allclose(ours[0], np.concatenate([want[0], want[1, P:], alone[0]]), atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_a_cache_equals_the_full_forward(family, rng, tiny_base, hf_dirs):
    """Two prompts, two rollouts each, one of them in no team; one prompt reaches into a second
    page.
    """
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    lengths, G, new = (45, 13), 2, 5
    drawn = [_clear_tokens(rng, model, (G, n + new), shared=n) for n in lengths]
    prompts = [rows[0][0, :n] for rows, n in zip(drawn, lengths)]
    new_BT = np.concatenate([rows[0][:, -new:] for rows in drawn])
    ours = continued(rng, base.params, base.cfg, prompts, np.arange(2 * G) // G, new_BT, alone=(3,))
    for i, (_, theirs, _) in enumerate(drawn):  # float32 sums in another order
        np.testing.assert_allclose(ours.first[i], theirs[0, : lengths[i]], atol=2e-4)
        np.testing.assert_allclose(ours.rest[i * G : (i + 1) * G], theirs[:, -new:], atol=2e-4)
    for i in range(2 * G):
        page, at = ours.layout.where(i, new).T
        written = ours.pool["dense"]["index"][:, page, at]
        assert np.any(written, axis=(1, 2)).tolist() == list(base.cfg.indexer.full), (
            "a layer without an indexer has no keys"
        )


@pytest.mark.parametrize(
    ("family", "remat"),
    [("deepseek_v32_dense", "none"), ("glm_dense", "names"), ("glm_dense", "full")],
)
def test_gradients_equal_torch_and_indexers_get_none(family, remat, rng, tiny_base, hf_dirs):
    base, model = tiny_base(family), oracles.torch_model(hf_dirs(family))
    tokens_BT, _, _ = _clear_tokens(rng, model)
    g_BTV = rng.normal(size=(B, T, 97)).astype(np.float32)
    (model(torch.tensor(tokens_BT, dtype=torch.long)).logits * torch.tensor(g_BTV)).sum().backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    loss = lambda params: jnp.sum(  # noqa: E731
        decoder_logits(params, None, tokens_BT, cfg=base.cfg, remat=remat) * g_BTV
    )
    for name, ours in hf.tensors(jax.grad(loss)(base.params), base.cfg):
        if ".indexer." in name:
            assert theirs.pop(name) is None
            assert not np.any(ours)
        else:
            want = theirs.pop(name).numpy()
            # float32 sums over tokens
            np.testing.assert_allclose(ours, want, atol=1e-4 * np.abs(want).max(), err_msg=name)
    assert not theirs


def test_decoding_under_an_adapter_equals_peft(rng, tiny_base, hf_dirs, tmp_path):
    """What an adapter does to the residual stream and to the query's latent moves the choice as
    well.
    """
    base = tiny_base("glm_dense")
    config = AdapterConfig(3, 9.0, ("q_a", "q_b", "kv_a", "kv_b", "o"))
    specs = transformer.abstract(base.cfg)
    adapter = random_adapter(rng, base, config)
    write_peft(tmp_path / "out", adapter, config, tables(base)[0], moe_type=True)
    model = peft_model(hf_dirs("glm_dense"), tmp_path / "out")
    tokens_BT, theirs, _ = _clear_tokens(rng, model)
    stacks, _ = tree.stack_adapters(specs, {"one": (config, adapter)})
    P = T - 3
    ours = continued(
        rng,
        base.params,
        base.cfg,
        list(tokens_BT[:, :P]),
        np.arange(B),
        tokens_BT[:, P:],
        stacks,
        {4: np.zeros(B)},
    )
    got = np.concatenate([np.stack(ours.first), ours.rest], axis=1)
    np.testing.assert_allclose(got, theirs, atol=2e-4)  # float32 sums in another order
