"""Names: what is allowed, what one text means, and hostile text."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mint_jax.catalog.records import names
from mint_jax.catalog.records.names import RevisionName, clean, parse_revision
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("p", RevisionName("default", "p", alias="latest")),
        ("p@latest", RevisionName("default", "p", alias="latest")),
        ("lab/p@serving", RevisionName("lab", "p", alias="serving")),
        ("lab/p", RevisionName("lab", "p", alias="latest")),
        ("p@12", RevisionName("default", "p", number=12)),
        ("p@0012", RevisionName("default", "p", number=12)),
        ("p@v12", RevisionName("default", "p", alias="v12")),
        (DIGEST, RevisionName(None, None, digest=DIGEST)),
        (DIGEST[:8], RevisionName(None, None, digest=DIGEST[:8])),
        (DIGEST[:7], RevisionName("default", DIGEST[:7], alias="latest")),
        (DIGEST.upper(), RevisionName("default", DIGEST.upper(), alias="latest")),
        ("a b.c:d", RevisionName("default", "a b.c:d", alias="latest")),
    ],
)
def test_what_a_text_means(text, meaning):
    assert parse_revision(text) == meaning


REFUSED = ["", "@", "@latest", "p@", "/p", "lab/", "p@a@b", "p@a/b", "p@123456789012", "lab/../p"]
REFUSED += ["lab/deadbeef", "12345678/abcdef1234", " p", "\u3000p", "é" * 201, None, 7, b"p"]


@pytest.mark.parametrize("text", REFUSED)
def test_other_values_are_refused(text):
    """``hostile_test`` has more."""
    with pytest.raises(UserError):
        parse_revision(text)


def test_one_visible_name_is_one_key(catalog):
    catalog.export("caf\u00e9/na\u00efve", packed(1), 1, create=True)
    assert catalog.resolve("cafe\u0301/nai\u0308ve").policy == "caf\u00e9/na\u00efve"
    with pytest.raises(UserError, match="exists already"):
        catalog.create_policy("cafe\u0301/nai\u0308ve", SCHEMA)
    catalog.promote("caf\u00e9/na\u00efve", 1, "r\u00e9sum\u00e9")
    assert catalog.resolve("caf\u00e9/na\u00efve@re\u0301sume\u0301").number == 1


@pytest.mark.parametrize("text", ["deadbeef", "20240101", DIGEST])
def test_names_that_would_read_as_digests_or_numbers_are_refused(catalog, text):
    with pytest.raises(UserError, match="would read as a revision's digest"):
        catalog.create_policy(text, SCHEMA)
    catalog.export("p", packed(1), 1, create=True)
    for alias in ("12", "٣"):
        with pytest.raises(UserError, match="would read as a revision's number"):
            catalog.promote("p", 1, alias)


# No st.text(): its table of all characters takes a quarter of a minute to make.
TEXT = st.text(
    st.sampled_from(
        list("aZ09f/@.~ _-\0\n\x7f\u0301\u00e9\u200b\u202e\u2028\u3000\ud800日🐈\u1100\u1161\ufb01")
    ),
    max_size=220,
)


@given(TEXT)
def test_what_is_clean_stays_itself(text):
    try:
        name = clean("name", text)
    except UserError:
        return
    assert clean("name", name) == name == unicodedata.normalize("NFC", name)
    assert 1 <= len(name) <= names.LONGEST
    assert not set("/@\0\n") & set(name)
    name.encode()


@given(TEXT)
def test_any_text_is_read_or_refused(text):
    try:
        named = parse_revision(text)
    except UserError:
        return
    assert (named.digest is None) == (named.policy is not None)
    assert [named.digest, named.number, named.alias].count(None) == 2
