"""Packing: for any groups, each target is there once and its position sees exactly the tokens
before it.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mint_jax.data.buckets import ShapeBook, round_up
from mint_jax.errors import UserError
from mint_jax.train.batch import Group, TrainSequence, by_sequence
from tests.groups import pack

TOKEN, NUMBER = st.integers(1, 999), st.floats(-4, 4, width=32)
PREFIX = st.lists(TOKEN, min_size=1, max_size=6)
WEIGHT = st.sampled_from([0.0, 0.5, 1.0, -0.25])


@st.composite
def sequences(draw):
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=7))
    n = len(tokens)
    weights = draw(st.lists(WEIGHT, min_size=n, max_size=n))
    columns = [draw(st.none() | st.lists(NUMBER, min_size=n, max_size=n)) for _ in range(3)]
    return TrainSequence(tokens, weights, *columns)


PAIR = st.builds(
    Group, PREFIX, st.lists(sequences(), min_size=2, max_size=2), st.floats(0, 2, width=32)
)
PLAIN = st.builds(Group, PREFIX, st.lists(sequences(), max_size=5))
# a policy of preference pairs has only pairs
GROUPS = st.lists(PAIR, min_size=1, max_size=4) | st.lists(PLAIN, min_size=1, max_size=5).filter(
    lambda made: any(g.sequences for g in made)
)


@settings(max_examples=40)
@given(st.lists(GROUPS, min_size=1, max_size=3), st.sampled_from([1, 3]))
def test_every_target_is_there_once_and_sees_what_comes_before_it(policies, row_multiple):
    batch, spans = pack(policies, ShapeBook(), row_multiple=row_multiple)
    P, B, _, M = batch.shape
    assert len(policies) == P
    assert B % row_multiple == 0
    taken, numbers = np.zeros((P, B, M), bool), set()
    for span in spans:
        p, first = span.block, span.start
        group, datum = policies[p][span.datum], span.work.data[span.datum]
        own, parent = batch.own[p, span.row], batch.parent[p, span.row]
        for place, s in enumerate(group.sequences):
            chosen = np.flatnonzero(s.weights)
            at = np.s_[p, span.row, first : first + len(chosen)]
            first += len(chosen)
            assert not taken[at].any(), "two sequences share a target"
            taken[at] = True
            np.testing.assert_array_equal(batch.target[at], np.array(s.tokens)[chosen])
            own_numbers = {*batch.loss.sequence[at].tolist()}
            assert len(own_numbers) == bool(len(chosen)), "one number for all of a sequence"
            for number in own_numbers:
                assert (p, number) not in numbers
                assert number < B * M
                numbers.add((p, number))
                if datum.pair_weight is not None:
                    assert number % 2 == place
                    weight = batch.loss.pair_weights[p, number // 2]
                    assert weight == np.float32(group.pair_weight)
            for name in ("weights", "advantages", "old_logp", "ref_logp"):
                values = getattr(s, name) or np.zeros(len(s.tokens))
                expected = np.float32(values)[chosen]
                np.testing.assert_array_equal(getattr(batch.loss, name)[at], expected, name)
            for j, index in zip(chosen, batch.index[at]):
                before = range(index + 1)
                sees = [k for k in before if own[k] == own[index] or own[k] == parent[index]]
                wanted = group.prefix + s.tokens[:j]
                assert batch.tokens[p, span.row, sees].tolist() == wanted
                assert batch.positions[p, span.row, sees].tolist() == list(range(len(wanted)))
                assert own[index] != 0
        values = np.arange(len(datum.targets), dtype=np.float32)
        kept = [np.array(x) for _, x in by_sequence(group, datum, values, np.nan)]
        for s, found in zip(group.sequences, kept):
            np.testing.assert_array_equal(np.isnan(found), np.array(s.weights) == 0)
        found = [x for found in kept for x in found if not np.isnan(x)]
        np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(batch.loss.weights != 0, taken)
    for p, made in enumerate(policies):
        assert batch.loss.pair_weights[p].sum() == pytest.approx(sum(g.pair_weight for g in made))
    longest = max(
        len(g.prefix) - 1 + sum(len(s.tokens) for s in g.sequences) for m in policies for g in m
    )
    assert (batch.own != 0).sum(axis=-1).max() <= round_up(longest, 16)


TWO = TrainSequence([2], [1.0])


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (Group([], [TWO]), "a group has an empty prefix"),
        (Group([1], [TWO] * 3, pair_weight=1.0), "a preference pair has 3 sequences; expected 2"),
        (Group([1], [TrainSequence([2, 3], [1.0])]), "a sequence has 2 tokens and 1 weights"),
        (Group([1], []), "a policy has no sequences to train on"),
        (Group([1], [TWO], temperature=0.0), "a group was drawn at temperature"),
        (
            Group([1] * 7, [TrainSequence([2] * 4, [1.0] * 4)]),
            "a prompt of 7 and a continuation of 4 tokens exceed the context of 10",
        ),
    ],
)
def test_groups_that_cannot_be_trained_on_are_refused(group, message):
    with pytest.raises(UserError, match=message):
        pack([[Group([1], [TWO])], [group]], ShapeBook(), context=10)
