"""Rounded sizes and remembered shapes, as properties."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mint_jax.data.buckets import ShapeBook, round_up

sizes = st.integers(1, 10**7)


@given(sizes, sizes)
def test_sizes_grow_by_at_most_an_eighth_and_keep_their_order(n, m):
    assert n <= round_up(n) <= n * 9 / 8
    assert round_up(round_up(n)) == round_up(n)
    assert (round_up(n) <= round_up(m)) == (n <= m) or round_up(n) == round_up(m)


def test_there_are_eight_sizes_between_powers_of_two():
    assert [round_up(n) for n in range(17)] == [1, *range(1, 17)]
    assert sorted({round_up(n) for n in range(17, 33)}) == [18, 20, 22, 24, 26, 28, 30, 32]
    for power in range(4, 20):
        assert len({round_up(n) for n in range(2**power + 1, 2 ** (power + 1) + 1)}) == 8


shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=30)


@given(shapes, st.tuples(st.integers(1, 40), st.integers(1, 40)), st.floats(1, 3))
def test_a_shape_fits_and_wastes_little_and_is_reused(needs, least, waste):
    book, given_out = ShapeBook(waste), []
    for needed in needs:
        fresh = tuple(map(round_up, needed, least))
        shape = book.fit(needed, least)
        assert all(a >= b for a, b in zip(shape, needed, strict=True))
        assert math.prod(shape) <= waste * math.prod(fresh)
        fitting = [
            s
            for s in given_out
            if all(a >= b for a, b in zip(s, needed)) and math.prod(s) <= waste * math.prod(fresh)
        ]
        if fitting:  # the smallest shape seen before that is small enough, else a new one
            assert shape in given_out
            assert math.prod(shape) == min(map(math.prod, fitting))
        else:
            assert shape == fresh
        given_out.append(shape)
    assert set(book.shapes) == set(given_out)


def test_shapes_of_other_ranks_are_not_mixed():
    book = ShapeBook(waste=100)
    assert book.fit((30,)) == (30,)
    assert book.fit((30, 30)) == (30, 30)
    assert book.fit((29,)) == (30,)
