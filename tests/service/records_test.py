"""Records as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint_jax.service.records import Kind, Record, decode, encode

TEXT = st.text(max_size=200)


@given(
    st.builds(
        Record,
        st.sampled_from(Kind),
        st.binary(min_size=16, max_size=16).map(bytes.hex),
        TEXT,
        st.integers(0, 2**64 - 1),
        TEXT,
        st.binary(min_size=32, max_size=32).map(bytes.hex),
        st.binary(max_size=300),
    )
)
def test_a_record_is_what_it_was(record):
    assert decode(encode(record)) == record


def test_numbers_of_kinds_stay():
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("REQUEST", 1),
        ("DONE", 2),
        ("FAILED", 3),
        ("DELIVERED", 4),
        ("ACKNOWLEDGED", 5),
        ("FORGOTTEN", 6),
        ("CHECKPOINT", 7),
    ]


def test_what_is_no_record_is_refused():
    whole = encode(Record(Kind.DONE))
    with pytest.raises(ValueError, match="are no record"):
        decode(whole[:-1])
    with pytest.raises(ValueError, match="200 is not a valid Kind"):
        decode(bytes([200]) + whole[1:])
