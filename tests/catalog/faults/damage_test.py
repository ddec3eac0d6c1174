"""Flipped bits and cut files, in the database and in packs: found, and attributed to what they hit.

A payload's reader gets the stored bytes or a ``UserError``; ``verify`` lists damage that no reader
has met.
"""

import os
import random
import shutil
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.errors import UserError
from tests.catalog.adapters import OTHER, SCHEMA, packed
from tests.catalog.conftest import execute, same_bytes

POLICIES = ("p", "q", "lab/p")
SCHEMAS = {"p": SCHEMA, "q": SCHEMA, "lab/p": OTHER}
DIGESTS = [
    digest_of(packed(10 * step + i, SCHEMAS[policy]))
    for step in range(8)
    for i, policy in enumerate(POLICIES)
]
NAMES = [
    f"{policy}@{which}"
    for policy in POLICIES
    for which in (*range(1, 9), "serving", "candidate", "latest")
] + DIGESTS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A catalog's folder, and what each name stands for."""
    folder = tmp_path_factory.mktemp("whole") / "catalog"
    with Catalog.open(folder) as catalog:
        truth = fill(catalog)
    assert not list(folder.glob("catalog.db-*")), "the log of a closed database is in the file"
    return folder, truth


def fill(catalog: Catalog) -> dict[str, Resolved]:
    """Three policies with eight revisions each, over two bases; what each name stands for."""
    for step in range(8):
        adapters = [
            (policy, packed(10 * step + i, SCHEMAS[policy])) for i, policy in enumerate(POLICIES)
        ]
        catalog.export_many(
            [Export(policy, adapter, step) for policy, adapter in adapters], create=True
        )
    for policy in POLICIES:
        catalog.promote(policy, 5)
        catalog.promote(policy, 3, "candidate")
        catalog.pin(policy, 2)
    assert list(catalog.verify()) == []
    return {name: catalog.resolve(name) for name in NAMES}


@pytest.fixture
def choice():
    return random.Random(int(os.environ["MINT_TEST_SEED"]))


def test_a_damaged_log_of_the_database_loses_its_end_only(tmp_path, choice):
    """SQLite's log has checksums: what lies after the damage was never committed, for SQLite."""
    catalog = Catalog.open(tmp_path / "whole")
    for step in range(12):
        catalog.export("p", packed(step), step, create=True)
    log = tmp_path / "whole" / "catalog.db-wal"
    data = log.read_bytes()
    for cut in (False, True) * 3:
        here = tmp_path / "damaged"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", here, ignore=shutil.ignore_patterns("*-shm"))
        damaged = bytearray(data)
        damaged[choice.randrange(32, len(data))] ^= 1 << choice.randrange(8)
        (here / log.name).write_bytes(data[: choice.randrange(len(data))] if cut else damaged)
        with Catalog.open(here) as found:
            revisions = found.revisions("p") if found.stats()["policies"] else []
            assert [one.number for one in revisions] == list(range(1, len(revisions) + 1))
            for one in revisions:
                assert same_bytes(found.load(f"p@{one.number}"), packed(one.step))
            assert list(found.verify()) == []
            found.export("p", packed(len(revisions)), len(revisions), create=True)
    catalog.close()


@pytest.mark.parametrize(
    "change", ['"offset" = "offset" + 64', "length = length - 64", "pack_id = 3"]
)
def test_a_wrong_place_is_found_by_the_digest(catalog, change):
    for step in range(3):
        catalog.export("p", packed(step), step, create=True)
    assert list(catalog.verify()) == []
    execute(catalog, f"UPDATE payloads SET {change} WHERE pack_id = 2")
    [finding] = catalog.verify()
    assert (finding.kind, finding.revisions) == ("payload", ("p@2",))
    with pytest.raises(UserError, match=r"payload .* is damaged"):
        catalog.load("p@2")
    assert same_bytes(catalog.load("p@3"), packed(2))


def test_nothing_is_collected_from_a_damaged_database(whole, tmp_path):
    """An index that has lost a revision makes its payload look unnamed."""
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "catalog")
    with (
        Catalog.open(tmp_path / "catalog") as catalog,
        catalog.database.engine.connect() as connection,
    ):
        connection.exec_driver_sql("PRAGMA writable_schema=ON")
        page = connection.exec_driver_sql(
            "SELECT rootpage FROM sqlite_master WHERE name = 'revisions_digest'"
        ).scalar()
    file = tmp_path / "catalog" / "catalog.db"
    data = bytearray(file.read_bytes())
    entry = data.index(packed_digest(30), (page - 1) * 4096)
    data[entry] ^= 1
    file.write_bytes(data)
    before = sorted(path.name for path in tmp_path.rglob("*.pack"))
    with Catalog.open(tmp_path / "catalog") as catalog:
        with pytest.raises(
            UserError, match=r"catalog\.db is damaged.*nothing was removed; restore it"
        ):
            catalog.gc(grace_s=0.0)
        assert catalog.stats()["payloads"] == 24
    assert sorted(path.name for path in tmp_path.rglob("*.pack")) == before


def packed_digest(value: int) -> bytes:
    return bytes.fromhex(digest_of(packed(value)))


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_pack_concerns_its_revisions_only(catalog, place, choice, how):
    """Several objects in each of two packs; damage in one is told of what it hits, and all others
    load.
    """
    values = {f"{side}{i}": 100 * number + i for number, side in enumerate("ab") for i in range(6)}
    for side in "ab":
        catalog.export_many(
            [Export(name, packed(value), 1) for name, value in values.items() if name[0] == side],
            create=True,
        )
    assert list(catalog.verify()) == []
    where = {name: catalog.resolve(name) for name in values}
    path = next(
        path for path in Path(place.payloads).rglob("*.pack") if path.stem == where["a0"].place.pack
    )
    data, hit = bytearray(path.read_bytes()), set()
    ends = {
        name: found.place.offset + found.place.length
        for name, found in where.items()
        if name[0] == "a"
    }
    if how == "flip":
        victim = choice.choice(sorted(ends))
        data[choice.randrange(where[victim].place.offset, ends[victim])] ^= 1 << choice.randrange(8)
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
    catalog.compact()  # leaves what is damaged, moves the rest
    for name in values.keys() - hit:
        assert same_bytes(catalog.load(name), packed(values[name]))
    for name in hit:
        catalog.export(name, packed(values[name] + 5000), 2)  # a policy goes on behind the damage
        assert same_bytes(catalog.load(name), packed(values[name] + 5000))
