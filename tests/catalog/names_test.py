"""Names: what is allowed, what one text means, and hostile text."""

import pytest

from mint_jax.catalog.records.names import RevisionName, parse_revision
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


@pytest.mark.parametrize("text", ["deadbeef", "20240101", DIGEST])
def test_names_that_would_read_as_digests_or_numbers_are_refused(catalog, text):
    with pytest.raises(UserError, match="would read as a revision's digest"):
        catalog.create_policy(text, SCHEMA)
    catalog.export("p", packed(1), 1, create=True)
    for alias in ("12", "٣"):
        with pytest.raises(UserError, match="would read as a revision's number"):
            catalog.promote("p", 1, alias)
