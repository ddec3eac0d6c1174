"""The sampler against float64 numpy: exact filtered distributions, ties, reproducible rows, log-probabilities.

Axes: B rows, V vocab.
"""

import jax
import numpy as np
import pytest
from scipy import special, stats

from mint_jax.rollout import sample as sample_lib
from mint_jax.rollout.sample import SamplingParams

DRAWS = 8192
P_VALUE = 1e-6  # of a chi-square test: about fifty of them fail by chance once in 20000 sessions
draw = jax.jit(sample_lib.sample)
DTYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}


def params(rows: int, **settings) -> SamplingParams:
    columns = {name: np.broadcast_to(np.asarray(value, DTYPES[name]), rows) for name, value in (DEFAULTS | settings).items()}
    return SamplingParams(**columns)


def reference(z_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Float64 probabilities after temperature, top-k, top-p and min-p in this order, by sorting; ties at an edge stay."""
    z = np.asarray(z_V, np.float64) / temperature
    if top_k:
        z = np.where(z >= np.sort(z)[::-1][min(top_k, z.size) - 1], z, -np.inf)
    p = special.softmax(z)
    if top_p < 1:
        down = np.sort(p)[::-1]
        p = np.where(p >= down[np.searchsorted(np.cumsum(down), top_p)], p, 0.0)
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def draws(rng, z_V, n=DRAWS, **settings) -> np.ndarray:
    """``n`` tokens of ``n`` random seeds, all from the same logits, which are padded to 11 (one program for all of them)."""
    seeds = rng.integers(0, 2**32, n, dtype=np.uint32)
    z_V = np.pad(np.asarray(z_V, np.float32), (0, max(0, 11 - len(z_V))), constant_values=-np.inf)
    z_BV = np.broadcast_to(z_V, (n, len(z_V)))
    return np.asarray(draw(z_BV, params(n, seed=seeds, **settings), np.int32(rng.integers(10_000)))[0])


def assert_distributed(tokens, p_V):
    seen = np.bincount(tokens, minlength=len(p_V))
    assert len(seen) == len(p_V), "a token outside the vocabulary"
    assert not seen[p_V == 0].any(), "a token of probability 0"
    expected = p_V * len(tokens)
    rare = expected < 5  # chi-square needs a few in every bin: rare tokens share one
    bins = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    if bins[1][-1] < 5:
        bins = tuple(np.append(b[:-2], b[-2:].sum()) for b in bins)
    assert len(bins[0]) == 1 or stats.chisquare(*bins).pvalue > P_VALUE


@pytest.mark.parametrize("vocab", [11, 300])  # less and more than one block of the sampler, and no multiple of it
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 4},
        {"top_k": 10_000},
        {"top_p": 0.2},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"min_p": 0.4},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 3.0, "min_p": 0.2},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 7, "min_p": 0.1},
        {"top_p": 0.9, "min_p": 0.15},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=lambda s: "-".join(f"{name}={value}" for name, value in s.items()) or "plain",
)
def test_draws_follow_the_filtered_distribution(rng, vocab, settings):
    z_V = (2 * rng.normal(size=vocab)).astype(np.float32)
    assert_distributed(draws(rng, z_V, **settings), reference(z_V, **settings))


@pytest.mark.parametrize(
    ("z_V", "settings", "kept"),
    [
        ([3, 2, 2, 2, 1], {"top_k": 2}, {0, 1, 2, 3}),
        ([1, 2, 2, 3, 2], {"top_k": 1}, {3}),
        ([0, 0, 0, 0, 0], {"top_k": 1}, {0, 1, 2, 3, 4}),
        ([0.0, -0.0, -1, -2, -3], {"top_k": 1}, {0, 1}),  # equal numbers with different bits
        (np.log([4, 1, 1, 1, 1]), {"top_p": 0.6}, {0, 1, 2, 3, 4}),
        (np.log([4, 1, 1, 1, 1]), {"top_p": 0.4}, {0}),
        ([5, 1, 5, 1, 0], {"min_p": 1.0}, {0, 2}),
        ([5, 4, 4, -9, 5], {"top_k": 3, "top_p": 0.5}, {0, 4}),
    ],
)
def test_ties_at_the_edge_of_a_filter_are_kept(rng, z_V, settings, kept):
    tokens = draws(rng, z_V, **settings)
    p_V = np.where(np.isin(np.arange(5), list(kept)), special.softmax(np.asarray(z_V, np.float64)), 0.0)
    assert set(tokens.tolist()) == kept
    assert_distributed(tokens, p_V / p_V.sum())


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_temperature_zero_takes_the_likeliest_and_the_first_of_equals(rng, settings):
    z_BV = rng.integers(-4, 5, (DRAWS, 300)).astype(np.float32)  # many ties
    tokens, _ = draw(z_BV, params(DRAWS, temperature=0.0, seed=rng.integers(0, 2**32, DRAWS, dtype=np.uint32), **settings), np.int32(3))
    np.testing.assert_array_equal(tokens, z_BV.argmax(axis=1))


def test_a_tiny_temperature_is_greedy_too(rng):
    z_BV = rng.normal(size=(DRAWS, 11)).astype(np.float32)
    tokens, _ = draw(z_BV, params(DRAWS, temperature=1e-30, seed=np.arange(DRAWS)), np.int32(0))
    np.testing.assert_array_equal(tokens, z_BV.argmax(axis=1))


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999999}, {"temperature": 5.0, "min_p": 1e-6}])
def test_tokens_without_probability_are_never_drawn(rng, settings):
    z_BV = rng.normal(size=(DRAWS, 300)).astype(np.float32)
    dead = rng.random((DRAWS, 300)) < 0.9
    dead[:, [0, -1]] = True
    dead[np.arange(DRAWS), rng.integers(1, 299, DRAWS)] = False
    z_BV[dead] = np.where(rng.random(dead.sum()) < 0.5, -np.inf, -3e4)  # -3e4: a weight that underflows to 0
    tokens, logprobs = draw(z_BV, params(DRAWS, seed=np.arange(DRAWS), **settings), np.int32(1))
    assert not dead[np.arange(DRAWS), np.asarray(tokens)].any()
    assert np.isfinite(logprobs).all()


def test_a_random_number_at_the_edge_of_a_token_never_picks_one_without_weight(rng):
    w_V = np.where(rng.random(900) < 0.7, 0.0, np.exp(3 * rng.normal(size=900))).astype(np.float32)
    w_V[:260] = w_V[760:] = 0.0  # whole blocks too, in front and at the end
    edges = np.unique(np.cumsum(w_V, dtype=np.float64) / w_V.sum(dtype=np.float64)).astype(np.float32)
    near = [edges]
    for _ in range(4):
        near += [np.nextafter(near[-1], np.float32(2)), np.nextafter(near[0], np.float32(-1))]
    u_B = np.concatenate([*near, np.float32([0, 1 - 2**-24])])
    u_B = u_B[(u_B >= 0) & (u_B < 1)]
    tokens = np.asarray(jax.jit(sample_lib._inverse_cdf)(np.broadcast_to(w_V, (len(u_B), 900)), u_B))
    assert (w_V[tokens] > 0).all()


def test_inverse_cdf_finds_the_token_of_every_random_number(rng):
    w_V = np.where(rng.random(900) < 0.3, 0.0, np.exp(2 * rng.normal(size=900))).astype(np.float32)
    u_B = rng.random(4000).astype(np.float32)
    upto = np.cumsum(w_V, dtype=np.float64) / w_V.sum(dtype=np.float64)
    tokens = np.asarray(jax.jit(sample_lib._inverse_cdf)(np.broadcast_to(w_V, (4000, 900)), u_B))
    low, high = upto[tokens] - w_V[tokens] / w_V.sum(dtype=np.float64), upto[tokens]
    slack = 2e-6  # rounding of 900 float32 additions moves an edge by that much
    assert ((low - slack <= u_B) & (u_B <= high + slack)).all()


@pytest.fixture
def mixed(rng):
    """64 rows, each with logits and settings of its own."""
    settings = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], 64),
        "top_k": rng.choice([0, 0, 1, 5, 50], 64),
        "top_p": rng.choice([1.0, 0.9, 0.3], 64),
        "min_p": rng.choice([0.0, 0.0, 0.1], 64),
        "seed": rng.integers(0, 2**32, 64, dtype=np.uint32),
    }
    return (3 * rng.normal(size=(64, 300))).astype(np.float32), params(64, **settings), rng.integers(0, 1000, 64).astype(np.int32)


def test_a_row_draws_the_same_token_alone_and_in_any_batch(rng, mixed):
    z_BV, settings, position_B = mixed
    tokens, logprobs = map(np.asarray, draw(z_BV, settings, position_B))
    shuffled = rng.permutation(64)
    other, _ = draw(z_BV[shuffled], SamplingParams(*(x[shuffled] for x in settings)), position_B[shuffled])
    np.testing.assert_array_equal(other, tokens[shuffled])
    for b in range(64):
        alone = draw(z_BV[b : b + 1], SamplingParams(*(x[b : b + 1] for x in settings)), position_B[b])
        assert alone[0][0] == tokens[b]
        np.testing.assert_allclose(alone[1][0], logprobs[b], rtol=1e-5, atol=1e-6)  # sums over V may be ordered otherwise


def test_logprobs_are_those_of_the_model_whatever_the_filters(mixed):
    z_BV, settings, position_B = mixed
    tokens, logprobs = map(np.asarray, draw(z_BV, settings, position_B))
    wanted = special.log_softmax(z_BV.astype(np.float64), axis=1)[np.arange(64), tokens]
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-6, atol=4e-6)  # float32 logits of size 10 round by 1e-6


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, -1)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(rng, seed_step, position_step):
    z_BV = np.full((DRAWS, 11), -np.inf, np.float32)
    z_BV[:, :4] = rng.normal(size=4)
    seed, position = int(rng.integers(2**20)), int(rng.integers(1, 1000))
    one, _ = draw(z_BV, params(DRAWS, seed=2 * np.arange(DRAWS) + seed), np.int32(position))
    two, _ = draw(z_BV, params(DRAWS, seed=2 * np.arange(DRAWS) + seed + seed_step), np.int32(position + position_step))
    table = np.zeros((4, 4))
    np.add.at(table, (np.asarray(one), np.asarray(two)), 1)
    assert stats.chi2_contingency(table + 1).pvalue > P_VALUE  # + 1: no empty row, which the test could not take
