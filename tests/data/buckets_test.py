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
