"""Losses and their gradients against the same formulas written in torch, float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from mint_jax.errors import UserError
from mint_jax.train import config, losses
from mint_jax.train.config import PAIRED, LossConfig
from mint_jax.train.losses import DTYPES, KINDS, KL_KINDS, LossCoefs, Targets, policy_loss
from tests.train.torch_lora import token_losses

B, M, Z = 3, 7, 3  # Z pairs: sequences 0 to 5
# band of k; dual clip; cap of k
BANDS = {"open": (0.0, np.inf, np.inf, np.inf), "band": (0.6, 1.5, 1.9, 1.2)}
# of the band and of the clips: ratios keep off them, where float32 could fall on the other side
EDGES = (0.6, 0.7, 1.2, 1.5, 1.6, 1.9)
ENTROPY = -0.5  # of a token, over its log-probability


def coefs(kind, kl_kind="none", band="open"):
    low, high, *bounds = BANDS[band]
    clip, of_pairs = (0.7, 1.6), (0.3, 0.1 if band == "band" else 0.0)  # margin, label smoothing
    of_kl = KL_KINDS.index(kl_kind), 0.37
    more = *bounds, *of_pairs, 0.2  # of the entropy
    return LossCoefs(KINDS.index(kind), *clip, *of_kl, low, high, 0.8, *more)


def stack(all_coefs):
    return LossCoefs(*(np.array(column, dtype) for column, dtype in zip(zip(*all_coefs), DTYPES)))


def draw(rng, policies):
    """Log-probabilities and targets of P policies; a third of the places is padding with nonsense
    in it.
    """
    shape = (policies, B, M)
    logp, advantages = -rng.exponential(1.0, shape), rng.normal(0, 1, shape)
    logs = rng.normal(0, 0.5, (2, *shape))
    for edge in EDGES:
        logs = np.where(np.abs(logs - np.log(edge)) < 1e-3, logs + 3e-3, logs)
    log_ratio, log_gap = logs
    is_first = rng.random(shape) < 0.3
    log_ratio = np.where(is_first, 0.0, log_ratio)
    ref_logp, weights = logp + rng.normal(0, 0.5, shape), rng.uniform(0.1, 1.0, shape)
    padding = rng.random(shape) < 0.33
    old_logp = np.where(padding, rng.normal(0, 100, shape), logp - log_ratio - log_gap)
    first_logp = np.where(padding, rng.normal(0, 100, shape), logp - log_ratio)
    first_logp = np.where(is_first, np.nan, first_logp)
    ref_logp = np.where(padding, rng.normal(0, 100, shape), ref_logp)
    weights = np.where(padding, 0.0, weights)
    pair_weights = rng.uniform(0.1, 1.0, (policies, Z))
    pair_weights[:, rng.integers(Z)] = 0.0
    floats = [np.float32(x) for x in (weights, advantages, old_logp, ref_logp)]
    sequence = rng.integers(0, 2 * Z, shape, dtype=np.int32)
    last = np.float32(pair_weights), np.float32(first_logp)
    return np.float32(logp), Targets(*floats, sequence, *last)


def reference(logp_BM, t, c):
    """Loss, its gradient and metrics of one policy, over its target tokens only."""
    live = t.weights != 0
    logp_all = torch.tensor(np.float64(logp_BM), requires_grad=True)
    logp = logp_all[torch.tensor(live)]
    weights, advantage, old, ref = (
        torch.tensor(np.float64(x[live])) for x in (t.weights, t.advantages, t.old_logp, t.ref_logp)
    )
    kind, kl_kind = KINDS[c.kind], KL_KINDS[c.kl_kind]
    first = torch.tensor(np.float64(t.first_logp[live]))
    first = torch.where(torch.isnan(first), logp.detach(), first)
    ratio, gap = torch.exp(logp - first), torch.exp(first - old)
    sequence = torch.tensor(t.sequence[live])
    means = torch.stack([(logp - first).detach()[sequence == s].mean() for s in sequence])
    whole = torch.exp(means + logp - logp.detach())
    if kl_kind == "k1":
        advantage = advantage - c.kl * (logp - ref).detach()
    outside = (gap < c.band_low) | (gap > c.band_high)
    sampler_kl = gap - torch.log(gap) - 1
    gap = torch.clamp(gap, max=c.sampler_cap)
    how = c.ratio_low, c.ratio_high, c.beta, c.ratio_dual, c.sampler_cap, whole
    loss = {**token_losses(logp, first, old, advantage, *how)}.get(kind, 0 * logp)
    k3 = torch.exp(ref - logp) - (ref - logp) - 1
    if kl_kind == "k3":
        loss = loss + c.kl * k3
    if kl_kind == "k2":
        loss = loss + c.kl * (logp - ref) ** 2 / 2
    loss, share = loss - c.entropy * ENTROPY * logp, torch.ones(len(logp))
    if kind not in ("cross_entropy", *PAIRED):  # nothing was sampled there, so there is no ratio
        loss, share = torch.where(outside, 0.0, loss), torch.where(outside, 0.0, gap)
    total = (weights * loss).sum()
    of_pairs = [(logp if kind == "simpo" else logp - ref)[sequence == s] for s in range(2 * Z)]
    gain = [x.sum() if kind not in ("ipo", "simpo") or not len(x) else x.mean() for x in of_pairs]
    margins = [c.beta * (gain[2 * z] - gain[2 * z + 1]) for z in range(Z)]
    for w, m in zip(np.float64(t.pair_weights), margins):
        right, wrong = (torch.log(torch.sigmoid(x)) for x in (m - c.margin, c.margin - m))
        if kind == "ipo":
            total = total + w * (m / c.beta - 1 / (2 * c.beta)) ** 2
        elif kind in PAIRED:
            total = total - w * ((1 - c.smoothing) * right + c.smoothing * wrong)
    total.backward()
    live_pairs = np.flatnonzero(t.pair_weights)
    paired = [float(margins[z].detach()) for z in live_pairs]
    one = whole if kind == "gspo" else ratio
    above, below = one > c.ratio_high, one < c.ratio_low
    bad = (advantage < 0) & (one > c.ratio_dual)
    against = (above & (advantage > 0)) | (below & (advantage < 0)) | bad
    binds = {"ppo": against, "gspo": against, "cispo": above | below}.get(kind, torch.zeros(()))
    metrics = {
        "tokens": live.sum(),
        "logp_sum": logp.sum(),
        "kl_sum": k3.sum(),
        "clipped_sum": (binds * ~outside).sum(),
        "masked_sum": outside.sum(),
        "gap_sum": (first - old).abs().sum(),
        "sampler_kl_sum": sampler_kl.sum(),
        "share_sum": share.sum(),
        "share_square_sum": (share**2).sum(),
        "entropy_sum": ENTROPY * logp.sum(),
        "max_gap": (first - old).abs().max(),
        "pairs": len(paired),
        "margin_sum": sum(paired),
        "chosen_sum": c.beta * sum(float(gain[2 * z].detach()) for z in live_pairs),
        "rejected_sum": c.beta * sum(float(gain[2 * z + 1].detach()) for z in live_pairs),
        "preferred_sum": sum(m > 0 for m in paired),
    }
    return (
        float(total.detach()),
        logp_all.grad.numpy(),
        {name: float(torch.as_tensor(value).detach()) for name, value in metrics.items()},
    )


@jax.jit
def value_and_grad(logp_PBM, targets, all_coefs):
    def loss(logp, t, c):
        return policy_loss(logp, t, c, ENTROPY * logp)

    return jax.vmap(jax.value_and_grad(loss, has_aux=True))(logp_PBM, targets, all_coefs)


def assert_matches(got, logp_PBM, targets, all_coefs):
    (losses, metrics), grads = got
    for p, c in enumerate(all_coefs):
        name = f"{KINDS[c.kind]} {KL_KINDS[c.kl_kind]} band {c.band_low} {c.band_high}"
        loss, grad, expected = reference(logp_PBM[p], jax.tree.map(lambda x, p=p: x[p], targets), c)
        # float32: logp - old_logp carries 1e-7 of a number up to about 10, and a sum has up to 21
        # terms of size about 5
        np.testing.assert_allclose(losses[p], loss, rtol=1e-5, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(grads[p], grad, rtol=2e-5, atol=2e-6, err_msg=name)
        for key, value in expected.items():
            np.testing.assert_allclose(
                metrics[key][p], value, rtol=1e-5, atol=2e-5, err_msg=f"{name} {key}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_loss_gradient_and_metrics_match_the_formula_in_float64(kind, rng):
    all_coefs = [coefs(kind, kl_kind, band) for kl_kind, band in itertools.product(KL_KINDS, BANDS)]
    logp, targets = draw(rng, len(all_coefs))
    assert_matches(value_and_grad(logp, targets, stack(all_coefs)), logp, targets, all_coefs)


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_at_tokens_of_weight_zero_counts_nowhere(kind, bad, rng):
    """Loss, gradient and every metric are those of the other tokens, and the gradient there is
    0.
    """
    band = "open" if kind in ("cross_entropy", *PAIRED) else "band"
    all_coefs = [coefs(kind, kl_kind, band) for kl_kind in KL_KINDS]
    logp, targets = draw(rng, len(all_coefs))
    weights = np.array(targets.weights)
    weights[:, 0, 0] = 0
    dead, targets = weights == 0, targets.replace(weights=weights)

    def spoilt(x):
        return np.where(dead, np.float32(bad), x)

    names = ("advantages", "old_logp", "ref_logp", "first_logp")
    targets = targets.replace(**{name: spoilt(getattr(targets, name)) for name in names})
    got = value_and_grad(spoilt(logp), targets, stack(all_coefs))
    assert not np.asarray(got[1])[dead].any()
    assert_matches(got, spoilt(logp), targets, all_coefs)


@pytest.mark.parametrize("gap", [-80.0, 80.0])
@pytest.mark.parametrize("of_updates", [-80.0, 0.0, 80.0])
@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_absurd_ratios_stay_finite(kind, of_updates, gap):
    one = jnp.ones((1, 2), jnp.float32)
    first = one * of_updates - 1
    last = jnp.zeros((1, 2), jnp.int32), jnp.zeros((0,)), first
    targets = Targets(one, -one, first + gap, one * gap - 1, *last)
    loss = jax.value_and_grad(lambda logp: policy_loss(logp, targets, coefs(kind, "k3"))[0])
    assert all(np.isfinite(x).all() for x in jax.jit(loss)(-one))


def test_gspo_is_a_ratio_of_sequences_where_their_tokens_are_alike(rng):
    """Oracle: the loss of arXiv 2507.18071 eq. 5, whose gradient flows through the mean."""
    logp, targets = draw(rng, 1)
    t, c = jax.tree.map(lambda x: x[0], targets), coefs("gspo")
    advantage, weight = rng.normal(size=2 * Z), rng.uniform(0.1, 1.0, 2 * Z)
    live = t.weights != 0
    t = t.replace(
        advantages=np.float32(advantage[t.sequence]),
        weights=np.float32(np.where(live, weight[t.sequence], 0.0)),
        first_logp=np.where(np.isnan(t.first_logp), logp[0], t.first_logp),
    )
    t = t.replace(old_logp=t.first_logp)
    value, grad = jax.value_and_grad(lambda x: policy_loss(x, t, c)[0])(logp[0])
    x = torch.tensor(np.float64(logp[0]), requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for s in range(2 * Z):
        here = torch.tensor(live & (t.sequence == s))
        ratio = torch.exp((x - torch.tensor(np.float64(t.first_logp)))[here].mean())
        clipped = torch.clamp(ratio, c.ratio_low, c.ratio_high)
        least = torch.minimum(ratio * advantage[s], clipped * advantage[s])
        loss = loss - (weight[s] * here.sum() * least if here.any() else 0.0)
    loss.backward()
    # float32: a log-ratio carries 1e-7 of a number up to about 10
    np.testing.assert_allclose(value, float(loss.detach()), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad, x.grad.numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dual_clip": 1.1}, "dual_clip is 1.1; expected more than 1 . clip_high"),
        ({"kind": "cispo", "dual_clip": 3.0}, "'cispo' does not use: drop it, or choose ppo or gs"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "'ipo' does not use: .* choose dpo or simpo"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "label_smoothing is 0.5; expected .* than 0.5"),
        ({"kind": "dro", "sampler_cap": 2.0}, "sampler_cap is 2.0, which loss 'dro' does not use"),
        ({"sampler_cap": 0.0}, "sampler_cap is 0.0; expected more than 0"),
        ({"kind": "simpo", "kl_kind": "k1"}, "'simpo' does not use: choose 'k2', 'k3'"),
    ],
)
def test_an_option_that_is_wrong_or_of_another_loss_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        LossConfig(**options)


def test_what_built_in_losses_need_is_what_they_read():
    """The table is there so that a config is checked without jax."""
    for kind, fn in losses.BUILT_IN.items():
        if kind not in PAIRED:
            found = {"old_logp" if name == "sampler_ratio" else name for name in losses.reads(fn)}
            assert found & {"advantages", "old_logp", "ref_logp"} == config.BUILT_IN[kind], kind
    assert set(losses.BUILT_IN) == set(KINDS)


@pytest.fixture
def registered(monkeypatch):
    for name in list(config.registered):
        monkeypatch.delitem(config.registered, name)
    yield
    config.registered.clear()


def tempered(t):
    """A loss that no built-in one is: advantages squashed, a ratio to the sampler under a root."""
    return (
        -jnp.tanh(t.advantages) * jnp.sqrt(t.ratio * t.sampler_ratio)
        + 0.1 * (t.logp - t.ref_logp) ** 2
    )


def test_a_registered_loss_is_the_sum_of_weight_times_what_it_returns(rng, registered):
    losses.register_loss("tempered", tempered)
    custom = losses.functions_of(["tempered", "ppo"])
    assert custom == (tempered,)
    assert config.needs("tempered") == {"advantages", "old_logp", "ref_logp"}
    c = coefs("ppo")._replace(kind=losses.index_of("tempered", custom))
    logp, targets = draw(rng, 1)
    t = jax.tree.map(lambda x: x[0], targets)
    value, grad = jax.value_and_grad(lambda x: policy_loss(x, t, c, custom=custom)[0])(logp[0])
    x = torch.tensor(np.float64(logp[0]), requires_grad=True)
    inputs = t.weights, t.advantages, t.old_logp, t.ref_logp
    weights, advantages, old, ref = (torch.tensor(np.float64(v)) for v in inputs)
    each = -torch.tanh(advantages) * torch.sqrt(torch.exp(x - old)) + 0.1 * (x - ref) ** 2
    loss = torch.where(weights != 0, weights * each, 0.0).sum()
    loss.backward()
    # float32: a log-ratio carries 1e-7 of a number up to about 10
    np.testing.assert_allclose(value, float(loss.detach()), rtol=1e-5)
    np.testing.assert_allclose(grad, x.grad.numpy(), rtol=2e-5, atol=2e-6)


def test_a_registered_loss_with_infinite_derivatives_leaves_its_neighbours_bits(rng, registered):
    losses.register_loss("steep", lambda t: jnp.sqrt(t.logp + 1.0) / t.advantages)
    custom = losses.functions_of(["steep"])
    logp, targets = draw(rng, 3)
    logp[:, 0] = -1.0  # where the root's derivative is infinite
    targets = targets.replace(
        advantages=np.where(targets.weights == 0, 0.0, targets.advantages).astype(np.float32)
    )
    others = stack([coefs("ppo"), coefs("cross_entropy"), coefs("gspo")])
    kinds = [others.kind[0], losses.index_of("steep", custom), others.kind[2]]
    beside = others._replace(kind=np.array(kinds, np.int32))
    run = jax.jit(jax.vmap(jax.value_and_grad(lambda *a: policy_loss(*a, custom=custom)[0])))
    alone, alone_grads = run(logp, targets, others)
    mixed, mixed_grads = run(logp, targets, beside)
    assert not np.isfinite(mixed_grads[1]).all(), "the loss is as steep as the test says"
    for p in (0, 2):
        np.testing.assert_array_equal(mixed[p], alone[p])
        np.testing.assert_array_equal(mixed_grads[p], alone_grads[p])
    targets.weights[1, 0] = 0.0
    logp[1, 1:] = -0.5
    _, grads = run(logp, targets, beside)
    assert np.isfinite(grads[1]).all(), "padding is no token of the loss"


@pytest.mark.parametrize(
    ("name", "fn", "says"),
    [
        ("ppo", lambda t: t.logp, "'ppo' is built in"),
        (3, lambda t: t.logp, "name of a loss is 3"),
        ("mine", "ppo", "'mine' is 'ppo'; expected a function"),
        ("mine", lambda t: t.logits, "raised AttributeError: .*'logits'"),
        ("mine", lambda t: t.logp.sum(), r"returns float32 of shape \(\) .*the trainer"),
        (
            "mine",
            lambda t: t.logp if t.logp[0, 0] > 0 else t.ratio,
            "raised TracerBoolConversionError",
        ),
    ],
)
def test_a_function_that_is_no_loss_is_refused_when_it_is_registered(name, fn, says, registered):
    with pytest.raises(UserError, match=says):
        losses.register_loss(name, fn)
    assert config.known_kinds() == KINDS
