"""Input that means harm, through the catalog's door: refused in words, or stored and given back
exactly; nothing else changes.
"""

import pytest

from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import same_bytes

BAD_NAMES = {
    "traversal": "../../etc/passwd",
    "backslashes and a drive": "a@..\\..\\c:",
    "NUL": "a\0b",
    "escape": "a\x1b[2Jb",
    "bidi override": "a\u202etxt.exe",
    "zero width": "pass\u200bword",
    "line separator": "a\u2028b",
    "lone surrogate": "a\ud800",
    "long": "a" * 100_000,
    "long in composition": "e\u0301" * 50_000,
    "empty": "",
    "many slashes": "a/b/c",
}
ODD_NAMES = [
    "'; DROP TABLE policies; --",
    'p" OR 1=1 --',
    "%",
    "_",
    "p%' ESCAPE '\\",
    "${jndi:ldap:x}",
    "{0.__class__}",
    "%s%n",
    "\u0440",  # Cyrillic, looks like p
    "\uff50",  # full width
    "naïve",
    "政策",
    "🦀",
    "-rf",
    "NULL",
    "CON",
    "a\\b",
    "~root",
]


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_harmful_name_is_refused_everywhere(catalog, name):
    catalog.export("p", packed(1), 1, create=True)
    before = catalog.stats()
    calls = [
        lambda: catalog.create_policy(name, SCHEMA),
        lambda: catalog.export(name, packed(2), 1, create=True),
        lambda: catalog.export_many(
            [Export("fresh", packed(3), 1), Export(name, packed(2), 1)], create=True
        ),
        lambda: catalog.promote("p", 1, name),
        lambda: catalog.branch(name, "p@1"),
        lambda: catalog.resolve(name),
        lambda: catalog.load(f"p@{name}"),
        lambda: catalog.resolve("p", tenant=name),
        lambda: catalog.lease(name, "me"),
        lambda: catalog.policy(name),
    ]
    for call in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()
    assert catalog.stats() == before


def test_odd_names_are_names_and_nothing_more(catalog, place):
    """No text is SQL, a pattern, a format or a path; those that look alike are different."""
    catalog.export("p", packed(0), 0, create=True)
    for number, name in enumerate(ODD_NAMES, start=1):
        catalog.export(name, packed(number), number, create=True, origin=name, by=name, why=name)
        catalog.promote(name, 1, f"{name}x", why=name)
    for number, name in enumerate(ODD_NAMES, start=1):
        assert same_bytes(catalog.load(name), packed(number))
        assert catalog.resolve(f"{name}@{name}x").policy == name
        entry = catalog.audit(name)[-1]
        assert (entry.actor, entry.why) == ("tester", name)
        assert catalog.revision(name, 1).origin == name
    assert {record.policy for record in catalog.policies()} == {"p", *ODD_NAMES}
    assert same_bytes(catalog.load("p"), packed(0))
    assert list(catalog.verify()) == []
