"""Routers against those of transformers, replayed choices, and the gradients that flow through the
weights.

Axes: B rows, T tokens, D model width, E experts, X experts of a token.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from mint_jax.models import router
from mint_jax.models.config import Experts

B, T, D, E, X = 3, 50, 24, 16, 5


def _qwen3(normalise):
    theirs = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=D, num_experts=E, num_experts_per_tok=X, norm_topk_prob=normalise
        )
    )
    return Experts(E, X, 8, normalise=normalise), theirs


def _deepseek(normalise, groups, chosen):
    fields = {
        "hidden_size": D,
        "n_routed_experts": E,
        "num_experts_per_tok": X,
        "norm_topk_prob": normalise,
    }
    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(**fields, n_group=groups, topk_group=chosen, routed_scaling_factor=2.5)
    )
    ours = Experts(
        E,
        X,
        8,
        scores="sigmoid",
        normalise=normalise,
        scale=2.5,
        groups=groups,
        groups_chosen=chosen,
    )
    return ours, theirs


ROUTERS = {
    "qwen3": (_qwen3, True),
    "qwen3_raw": (_qwen3, False),
    "deepseek": (_deepseek, True, 4, 2),
    "deepseek_raw": (_deepseek, False, 4, 2),
    "deepseek_one_group": (_deepseek, True, 1, 1),
}


def _random(make, rng):
    """Both routers with the same weights, and random tokens."""
    experts, theirs = make[0](*make[1:])
    w_DE = rng.normal(size=(D, E)).astype(np.float32) * D**-0.5
    p = {"router": {"w": jnp.asarray(w_DE)}}
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(w_DE.T))
        if experts.scores == "sigmoid":
            bias_E = rng.normal(size=E).astype(np.float32) * 0.3
            theirs.e_score_correction_bias.copy_(torch.tensor(bias_E))
            p["router"]["choice_bias"] = jnp.asarray(bias_E)
    return experts, theirs, p, rng.normal(size=(B, T, D)).astype(np.float32)


def _by_id(ids, weights):
    """Weights ``[N, E]``, zero for experts that were not chosen."""
    ids, weights = (np.asarray(v).reshape(-1, X) for v in (ids, weights))
    out = np.zeros((len(ids), E))
    np.put_along_axis(out, ids, weights, axis=1)
    return out


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_and_gradients_equal_transformers(name, rng):
    experts, theirs, p, h_BTD = _random(ROUTERS[name], rng)
    g_NE = rng.normal(size=(B * T, E)).astype(np.float32)
    x = torch.tensor(h_BTD.reshape(-1, D), requires_grad=True)
    _, want, want_ids = theirs(x)
    (want * torch.gather(torch.tensor(g_NE), 1, want_ids)).sum().backward()

    def loss(h_BTD, w_DE):
        ids, weights, _ = router.route(h_BTD, {"router": p["router"] | {"w": w_DE}}, None, experts)
        return jnp.sum(weights * jnp.take_along_axis(g_NE.reshape(B, T, E), ids, axis=-1)), (
            ids,
            weights,
        )

    (dh, dw), (ids, weights) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
        jnp.asarray(h_BTD), p["router"]["w"]
    )
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    np.testing.assert_array_equal(
        np.sort(ids.reshape(-1, X), axis=1), np.sort(want_ids.numpy(), axis=1)
    )
    assert len(np.unique(ids)) > X, "tokens must disagree, or the test says nothing"
    # float32 on both sides: logits of size 1 after sums of 24 terms
    np.testing.assert_allclose(_by_id(ids, weights), _by_id(want_ids, want.detach()), atol=1e-5)
    np.testing.assert_allclose(dh.reshape(-1, D), x.grad, atol=1e-5)
    np.testing.assert_allclose(
        dw.T, theirs.weight.grad, atol=1e-5 * float(theirs.weight.grad.abs().max() + 1)
    )


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_replay_takes_the_place_of_the_choice(name, rng):
    """Recorded ids get this router's own scores; tokens without a record choose themselves."""
    experts, _, p, h_BTD = _random(ROUTERS[name], rng)
    own, own_weights, _ = router.route(h_BTD, p, None, experts)
    replay = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.int8), (B, T, E)), axis=-1)[
        ..., :X
    ].copy()
    replay[:, ::3] = -1
    ids, weights, missed = router.route(h_BTD, p, None, experts, jnp.asarray(replay))
    np.testing.assert_array_equal(ids[:, ::3], own[:, ::3])
    np.testing.assert_array_equal(weights[:, ::3], own_weights[:, ::3])
    recorded = np.arange(T) % 3 > 0
    np.testing.assert_array_equal(np.asarray(ids)[:, recorded], replay[:, recorded])

    logits = np.asarray(h_BTD, np.float64) @ np.asarray(p["router"]["w"], np.float64)
    scores = (
        1 / (1 + np.exp(-logits))
        if experts.scores == "sigmoid"
        else np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    )
    want = np.take_along_axis(scores, np.asarray(ids), axis=-1)
    want = experts.scale * want / want.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, want, rtol=1e-5)  # float32 exponentials of logits of size 1

    def total(h_BTD, replay):
        weights = router.route(h_BTD, p, None, experts, replay)[1]
        return jnp.sum(weights * jnp.arange(1.0, X + 1)[None, None])

    # the gradient is that of a router that had chosen these experts
    same = jax.grad(total)(jnp.asarray(h_BTD), own)
    # the same sums, fused otherwise
    np.testing.assert_allclose(same, jax.grad(total)(jnp.asarray(h_BTD), None), atol=1e-6)
    assert (np.abs(jax.grad(total)(jnp.asarray(h_BTD), jnp.asarray(replay))).max(-1) > 0).all()
