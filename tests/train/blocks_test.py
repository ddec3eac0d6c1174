"""Blocks: every datum is computed once, sees itself alone, and its results come back to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.errors import UserError
from mint_jax.train.blocks import (
    BlockShape,
    Datum,
    TrainRequest,
    check,
    check_loss,
    collect,
    cut,
    fill,
    used,
)
from mint_jax.train.losses import KINDS, NO_LOSS
from tests.train.live_test import LOSSES, coefs


def datum(rng, n, width=0, routes=False, **fields):
    shape = (n, width) if width else (n,)
    tokens, targets = (
        rng.integers(3, 97, n).astype(np.int32),
        rng.integers(3, 97, shape).astype(np.int32),
    )
    made = {"routes": rng.integers(0, 4, (n, 2, 3)).astype(np.int16)} if routes else {}
    return Datum(tokens, targets, rng.normal(size=shape).astype(np.float32), **made | fields)


LENGTHS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=60)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(9, 20),
    st.sampled_from([0, 2, 3]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_every_datum_is_computed_once_and_sees_itself_alone(lengths, P, B, T, width, routed, seed):
    rng = np.random.default_rng(seed)
    shape = BlockShape(P, B, T, max(width, 1))
    sampled = {} if width else {"advantages": 1, "old_logp": 1}
    works = []
    for p, each in enumerate(lengths):
        data = [
            datum(
                rng,
                n,
                width,
                routed,
                **{name: rng.normal(size=n).astype(np.float32) for name in sampled},
            )
            for n in each
        ]
        works.append(TrainRequest(f"p{p}", data, NO_LOSS))
    steps, expected = 0, [0.0] * len(works)
    while any(w.left for w in works):
        made = cut(works, shape)
        assert 1 <= len(made) <= P
        owners = [b.work.policy for b in made]
        waiting = [w.policy for w in works if w.left]
        assert set(owners) == set(waiting[:P]), "works take turns"
        batch, places = fill(made, shape)
        assert batch.shape == (P, B, T, T)
        before = sum(len(w.left) for w in works)
        for place in places:
            one = place.work.data[place.datum]
            n = one.tokens.size
            at = np.s_[place.block, place.row, place.start : place.start + n]
            np.testing.assert_array_equal(batch.tokens[at], one.tokens)
            np.testing.assert_array_equal(batch.positions[at], np.arange(n))
            np.testing.assert_array_equal(batch.target[at].reshape(one.targets.shape), one.targets)
            for name in ("weights", *sampled):
                values = getattr(batch.loss, name).reshape(P, B, T, -1)[at]
                np.testing.assert_array_equal(values.reshape(one.targets.shape), getattr(one, name))
            assert len(set(batch.own[at].tolist())) == 1
            assert (batch.own[place.block, place.row] == batch.own[at][0]).sum() == n, (
                "a segment of its own"
            )
            numbers = batch.loss.sequence.reshape(P, B, T, -1)
            assert (numbers[at] == numbers[at].flat[0]).all()
            others = [q for q in places if q.block == place.block and q is not place]
            assert all(
                numbers[q.block, q.row, q.start].flat[0] != numbers[at].flat[0] for q in others
            )
            if routed:
                np.testing.assert_array_equal(np.swapaxes(batch.routes[:, *at], 0, 1), one.routes)
        assert used(made) == (batch.own != 0).sum()
        assert not batch.own[len(made) :].any()
        assert not batch.loss.weights[len(made) :].any()
        np.testing.assert_array_equal(batch.parent, batch.own)
        np.testing.assert_array_equal(batch.loss.first_logp, batch.loss.old_logp)
        logp, losses = rng.normal(size=(P, B, T, shape.width)), rng.normal(size=P)
        collect(places, logp, {"loss": losses})
        assert sum(len(w.left) for w in works) == before - len(places)
        for block, loss in zip(made, losses):
            expected[works.index(block.work)] += float(loss)
        for place in places:
            one = place.work.data[place.datum]
            mine = logp[place.block, place.row, place.start : place.start + one.tokens.size]
            np.testing.assert_array_equal(
                place.work.logprobs[place.datum], mine.reshape(one.targets.shape)
            )
        steps += 1
    assert [w.loss for w in works] == pytest.approx(expected)
    assert steps <= sum(map(len, lengths))


def wrong(rng, **fields):
    made = datum(rng, 4)
    values = {"tokens": made.tokens, "targets": made.targets, "weights": made.weights} | fields
    return Datum(**values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tokens": np.zeros(0, np.int32)},
            r"datum 1 has tokens of shape \(0,\); expected \[N\], at least one",
        ),
        (
            {"tokens": np.zeros(21, np.int32)},
            "datum 1 has 21 tokens; this server trains on at most 20: shorten it",
        ),
        (
            {"targets": np.zeros(3, np.int32)},
            r"datum 1 has 4 tokens and targets of shape \(3,\); expected \[4\] or \[4, K\]",
        ),
        (
            {"weights": np.zeros(3, np.float32)},
            r"targets of shape \(4,\) and weights of \(3,\); expected the same",
        ),
        (
            {"tokens": np.array([1, -1, 2, 3])},
            "datum 1 has -1 among its tokens; this base's vocabulary has 0 to 96",
        ),
        ({"weights": np.float32([1, np.nan, 0, 0])}, "datum 1 has weights that are not finite"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(fields, message, rng, tiny_base):
    cfg = tiny_base().cfg
    shapes = [BlockShape(1, 1, 20), BlockShape(2, 1, 8), BlockShape(1, 1, 6, 3)]
    check([datum(rng, 4), datum(rng, 20)], cfg, shapes)
    check([datum(rng, 4), datum(rng, 6, 3)], cfg, shapes)
    with pytest.raises(UserError, match=message):
        check([datum(rng, 4), wrong(rng, **fields)], cfg, shapes)


def test_data_without_what_their_loss_needs_are_refused(rng):
    sampled = {name: np.zeros(4, np.float32) for name in ("advantages", "old_logp")}
    for kind in LOSSES:
        check_loss([datum(rng, 4, **sampled)], coefs(kind))
        if kind != "cross_entropy":
            for lacks in sampled:
                given = {name: values for name, values in sampled.items() if name != lacks}
                with pytest.raises(
                    UserError,
                    match=f"datum 1 has no {lacks}; loss '{kind}' needs advantages and old_logp",
                ):
                    check_loss([datum(rng, 4, **sampled), datum(rng, 4, **given)], coefs(kind))
            with pytest.raises(UserError, match="datum 0 has 3 targets a position; loss"):
                check_loss([datum(rng, 4, 3)], coefs(kind))
    check_loss([datum(rng, 4, 3)], coefs("cross_entropy"))
    for wrong in (coefs("ppo")._replace(kind=KINDS.index("dpo")), coefs("ppo")._replace(kl_kind=1)):
        with pytest.raises(
            UserError, match="needs pairs or a reference; live training has neither"
        ):
            check_loss([datum(rng, 4, **sampled)], wrong)
