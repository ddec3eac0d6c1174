"""The sampler against float64 numpy: exact filtered distributions, ties, reproducible rows,
log-probabilities.

Axes: B rows, V vocab.
"""

import functools

import jax
import numpy as np
import pytest
from scipy import special, stats

from mint_jax.rollout import sample as sample_lib
from mint_jax.rollout.sample import SamplingParams

pytestmark = pytest.mark.bits

DRAWS = 8192
P_VALUE = 1e-6  # of a chi-square test: about fifty of them fail by chance once in 20000 sessions
SAMPLERS = {
    kernel: jax.jit(functools.partial(sample_lib.sample, kernel=kernel))
    for kernel in ("cpu", "xla")
}
DEFAULTS = {"temperature": np.float32(1), "top_k": np.int32(0), "top_p": np.float32(1)}
DEFAULTS |= {"min_p": np.float32(0), "seed": np.uint32(0)}


@pytest.fixture(params=["cpu", "xla"])
def draw(request):
    """``sample`` by each implementation of the draw itself."""
    return SAMPLERS[request.param]


def params(rows: int, **settings) -> SamplingParams:
    columns = ((DEFAULTS | settings)[name] for name in DEFAULTS)
    dtypes = (value.dtype for value in DEFAULTS.values())
    return SamplingParams(*(np.broadcast_to(np.asarray(*c), rows) for c in zip(columns, dtypes)))


def reference(z_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Float64 probabilities after temperature, top-k, top-p and min-p in this order, by sorting;
    ties at an edge stay.
    """
    z = np.asarray(z_V, np.float64) / temperature
    if top_k:
        z = np.where(z >= np.sort(z)[::-1][min(top_k, z.size) - 1], z, -np.inf)
    p = special.softmax(z)
    if top_p < 1:
        down = np.sort(p)[::-1]
        p = np.where(p >= down[np.searchsorted(np.cumsum(down), top_p)], p, 0.0)
    p = np.where(p >= min_p * p.max(), p, 0.0)
    return p / p.sum()


def draws(draw, rng, z_V, n=DRAWS, **settings) -> np.ndarray:
    """``n`` tokens of ``n`` random seeds, all from the same logits, which are padded to 11 (one
    program for all of them).
    """
    seeds = rng.integers(0, 2**32, n, dtype=np.uint32)
    z_V = np.pad(np.asarray(z_V, np.float32), (0, max(0, 11 - len(z_V))), constant_values=-np.inf)
    z_BV = np.broadcast_to(z_V, (n, len(z_V)))
    place = np.int32(rng.integers(10_000))
    return np.asarray(draw(z_BV, params(n, seed=seeds, **settings), place)[0])


def assert_distributed(tokens, p_V):
    seen = np.bincount(tokens, minlength=len(p_V))
    assert len(seen) == len(p_V), "a token outside the vocabulary"
    assert not seen[p_V == 0].any(), "a token of probability 0"
    expected = p_V * len(tokens)
    rare = expected < 5  # chi-square needs a few in every bin: rare tokens share one
    bins = tuple(np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    if bins[1][-1] < 5:
        bins = tuple(np.append(b[:-2], b[-2:].sum()) for b in bins)
    assert len(bins[0]) == 1 or stats.chisquare(*bins).pvalue > P_VALUE


@pytest.mark.parametrize("vocab", [300])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 4},
        {"top_p": 0.9},
        {"min_p": 0.4},
        {"temperature": 1.5, "top_k": 6},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.95, "min_p": 0.05},
    ],
    ids=lambda s: "-".join(f"{name}={value}" for name, value in s.items()) or "plain",
)
def test_draws_follow_the_filtered_distribution(draw, rng, vocab, settings):
    z_V = (2 * rng.normal(size=vocab)).astype(np.float32)
    assert_distributed(draws(draw, rng, z_V, **settings), reference(z_V, **settings))


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
def test_ties_at_the_edge_of_a_filter_are_kept(draw, rng, z_V, settings, kept):
    tokens = draws(draw, rng, z_V, **settings)
    p_V = special.softmax(np.asarray(z_V, np.float64)) * np.isin(np.arange(5), list(kept))
    assert set(tokens.tolist()) == kept
    assert_distributed(tokens, p_V / p_V.sum())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_draws_a_token_of_the_vocabulary_and_leaves_others_alone(
    draw, rng, value
):
    z_BV = rng.normal(size=(8, 300)).astype(np.float32)
    seed_B = np.arange(8)
    right, _, _ = draw(z_BV, params(8, seed=seed_B), np.int32(0))
    z_BV[3, 170] = value
    tokens, logprobs, _ = map(np.asarray, draw(z_BV, params(8, seed=seed_B), np.int32(0)))
    assert tokens[3] == 0
    assert not np.isfinite(logprobs[3])
    np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(right, 3))


@pytest.fixture
def mixed(rng):
    """64 rows, each with logits and settings of its own."""
    choices = {"temperature": [0.0, 0.5, 1.0, 2.0], "top_k": [0, 0, 1, 5, 50]}
    choices |= {"top_p": [1.0, 0.9, 0.3], "min_p": [0.0, 0.0, 0.1]}
    settings = {name: rng.choice(values, 64) for name, values in choices.items()}
    given = params(64, seed=rng.integers(0, 2**32, 64, dtype=np.uint32), **settings)
    z_BV = np.float32(3 * rng.normal(size=(64, 300)))
    return z_BV, given, np.int32(rng.integers(0, 1000, 64))


EXTREMES = {
    "temperature": [0.0, 1e-45, 1e-38, 1e-30, 1e-3, 0.5, 1.0, 1.0, 2.0, 1e3, 1e20, 1e30],
    "top_k": [0, 0, 0, 1, 2, 7, 300, 2**31 - 1],
    "top_p": [1.0, 1.0, 1.0, 5e-324, 1e-45, 1e-40, 1e-38, 1e-3, 0.5, 0.9, 1 - 2**-24],
    "min_p": [0.0, 0.0, 1e-45, 1e-40, 1e-6, 0.3, 1.0],
}
CHANGED = {
    "repetition": [1.0, 1.0, 1e-6, 0.5, 2.0, 1e6],
    "frequency": [0.0, 0.0, -1e6, -2.0, 2.0, 1e6],
    "presence": [0.0, 0.0, -1e6, -2.0, 2.0, 1e6],
}
BIASES = [0.0, 1.0, -100.0, 100.0, -1e4, 1e30, -1e30]


@functools.partial(jax.jit, static_argnames="kernel")
def penalise_and_draw(z_BV, params, position, tokens, prompt, drawn, kernel):
    def change(z_BV):
        return sample_lib.penalised(z_BV, params.penalties, tokens, prompt, drawn)

    changes = sample_lib.Changes(np.ones(len(z_BV), bool), change)
    return change(z_BV), *sample_lib.sample(z_BV, params, position, changes, kernel=kernel)


def extreme_rows(rng, rows, vocab, penalised):
    """Logits with ties, with tokens far below, with one token left; settings anywhere in their
    ranges.
    """
    z_BV = np.float32(rng.normal(size=(rows, vocab)) * rng.choice([1, 5, 1e3], (rows, 1)))
    z_BV[::5] = np.round(z_BV[::5])
    dead = rng.random((rows, vocab)) < rng.choice([0.0, 0.5, 1.0], (rows, 1))
    dead[np.arange(rows), rng.integers(vocab, size=rows)] = False
    z_BV[dead] = -np.inf
    settings = {name: rng.choice(np.array(values), rows) for name, values in EXTREMES.items()}
    plain = np.ones(rows), np.zeros(rows), np.zeros(rows)
    changed = [rng.choice(values, rows) for values in CHANGED.values()] if penalised else plain
    ids = np.argsort(rng.random((rows, vocab)))[:, :40].astype(np.int32)
    ids[rng.random(rows) < (0.5 if penalised else 1.0)] = -1
    penalties = sample_lib.Penalties(
        *map(np.float32, changed), ids, np.float32(rng.choice(BIASES, ids.shape))
    )
    return z_BV, settings, penalties


@pytest.mark.parametrize("kernel", ["cpu", "xla"])
def test_no_settings_give_nan_or_a_token_that_they_exclude(rng, kernel):
    rows, vocab, checked = 256, 300, 0
    prompt = np.arange(12) < np.full((rows, 1), 5)
    for turn in range(8):
        z_BV, settings, penalties = extreme_rows(rng, rows, vocab, penalised=turn % 2)
        given = params(rows, seed=rng.integers(0, 2**32, rows, dtype=np.uint32), **settings)
        tokens = rng.integers(vocab, size=prompt.shape).astype(np.int32)
        given = given._replace(penalties=penalties)
        got = penalise_and_draw(z_BV, given, np.int32(turn), tokens, prompt, ~prompt, kernel)
        for b, (z_V, token, logprob, drawn_logprob) in enumerate(zip(*map(np.asarray, got))):
            what = {name: column[b] for name, column in settings.items()}
            assert np.isfinite([logprob, drawn_logprob]).all(), what
            assert np.isfinite(z_BV[b, token]), (what, "a token without probability")
            if what["temperature"] < 2**-126:
                assert token == z_V.argmax(), what
                continue
            # Rounding may move a token across the edge of a filter: a token that was drawn passes
            # looser ones.
            loose = what | {"min_p": what["min_p"] * (1 - 1e-4)}
            loose["top_p"] = min(1.0, what["top_p"] * (1 + 1e-4) + 1e-6)
            z_V = np.float64(z_V)
            with np.errstate(over="ignore"):
                assert reference(z_V, **loose)[token] > 0, what
                p_V = reference(z_V, **what)
            if what["top_p"] == 1 and what["min_p"] == 0:
                # of the difference, in float32
                error = 1e-5 + 4e-7 * (z_V.max() - z_V[token]) / what["temperature"]
                np.testing.assert_allclose(
                    drawn_logprob, np.log(p_V[token]), atol=error, err_msg=str(what)
                )
                checked += 1
    assert checked > 50


def test_a_row_draws_the_same_token_alone_and_in_any_batch(draw, rng, mixed):
    tokens, logprobs, _ = map(np.asarray, draw(*mixed))
    shuffled = rng.permutation(64)
    for rows in (shuffled, *shuffled[:, None]):
        other = draw(*jax.tree.map(lambda x, rows=rows: x[rows], mixed))
        np.testing.assert_array_equal(other[0], tokens[rows])
        # sums over V may be ordered otherwise
        np.testing.assert_allclose(other[1], logprobs[rows], rtol=1e-5, atol=1e-6)


def test_logprobs_are_those_of_the_model_and_of_the_distribution_drawn_from(draw, mixed):
    z_BV, settings, position_B = mixed
    tokens, logprobs, drawn = map(np.asarray, draw(z_BV, settings, position_B))
    wanted = special.log_softmax(z_BV.astype(np.float64), axis=1)[np.arange(64), tokens]
    # float32 logits of size 10 round by 1e-6
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-6, atol=4e-6)
    hot = settings.temperature > 0
    for b in np.flatnonzero(hot):
        p_V = reference(z_BV[b], *(column[b] for column in settings[:4]))
        # twice that, at T 0.5
        np.testing.assert_allclose(drawn[b], np.log(p_V[tokens[b]]), rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(drawn[~hot], logprobs[~hot])
