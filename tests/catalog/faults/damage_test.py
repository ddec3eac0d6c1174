"""Flipped bits and cut files, in the database and in packs: found, and attributed to what they hit.

A payload's reader gets the stored bytes or a ``UserError``; ``verify`` lists damage that no reader
has met.
"""

import os
import random
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import packed
from tests.catalog.conftest import same_bytes


@pytest.fixture
def choice():
    return random.Random(int(os.environ["MINT_TEST_SEED"]))


def test_nothing_is_collected_from_a_damaged_database(tmp_path):
    """An index that has lost a revision makes its payload look unnamed."""
    with Catalog.open(tmp_path / "catalog") as catalog:
        for step in range(8):
            catalog.export("p", packed(step), step, create=True)
        with catalog.database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA writable_schema=ON")
            page = connection.exec_driver_sql(
                "SELECT rootpage FROM sqlite_master WHERE name = 'revisions_digest'"
            ).scalar()
    file = tmp_path / "catalog" / "catalog.db"
    data = bytearray(file.read_bytes())
    entry = data.index(bytes.fromhex(digest_of(packed(3))), (page - 1) * 4096)
    data[entry] ^= 1
    file.write_bytes(data)
    before = sorted(path.name for path in tmp_path.rglob("*.pack"))
    with Catalog.open(tmp_path / "catalog") as catalog:
        with pytest.raises(
            UserError, match=r"catalog\.db is damaged.*nothing was removed; restore it"
        ):
            catalog.gc(grace_s=0.0)
        assert catalog.stats()["payloads"] == 8
    assert sorted(path.name for path in tmp_path.rglob("*.pack")) == before


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_pack_concerns_its_revisions_only(catalog, place, choice, how):
    """Several objects in each of two packs; what the damage of one hits is reported, and all others
    load.
    """
    values = {f"{side}{i}": 100 * number + i for number, side in enumerate("ab") for i in range(6)}
    for side in "ab":
        catalog.export_many(
            [Export(name, packed(value), 1) for name, value in values.items() if name[0] == side],
            create=True,
        )
    assert list(catalog.verify()) == []
    where = {name: catalog.resolve(name).place for name in values}
    [path] = Path(place.payloads).rglob(f"{where['a0'].pack}.pack")
    data, hit = bytearray(path.read_bytes()), set()
    ends = {name: at.offset + at.length for name, at in where.items() if name[0] == "a"}
    if how == "flip":
        victim = choice.choice(sorted(ends))
        data[choice.randrange(where[victim].offset, ends[victim])] ^= 1 << choice.randrange(8)
        hit = {victim}
    elif how == "cut":
        size = choice.randrange(1, len(data))
        data, hit = data[:size], {name for name, end in ends.items() if end > size}
    path.chmod(0o644)
    path.write_bytes(data)
    if how == "gone":
        path.unlink()
        hit = set(ends)
    findings = list(catalog.verify())
    assert {name for finding in findings for name in finding.revisions} == {
        f"{name}@1" for name in hit
    }
    for name, value in values.items():
        if name in hit:
            with pytest.raises(UserError):
                catalog.load(name)
        else:
            assert same_bytes(catalog.load(name), packed(value))
    catalog.gc()  # leaves what is damaged, moves the rest
    for name in values.keys() - hit:
        assert same_bytes(catalog.load(name), packed(values[name]))
    for name in hit:
        catalog.export(name, packed(values[name] + 5000), 2)  # a policy goes on behind the damage
        assert same_bytes(catalog.load(name), packed(values[name] + 5000))
