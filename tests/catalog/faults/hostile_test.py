"""Input that means harm, through the catalog's door: refused in words, or stored and given back
exactly; nothing else changes.
"""

from tests.catalog.adapters import packed
from tests.catalog.conftest import same_bytes

ODD_NAMES = ["'; DROP TABLE policies; --", "%", "p%' ESCAPE '\\", "${jndi:ldap:x}", "%s%n"]
ODD_NAMES += ["\u0440", "\uff50", "政策", "🦀", "-rf", "NULL", "a\\b"]  # two look like p


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
