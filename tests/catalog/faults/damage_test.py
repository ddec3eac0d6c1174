"""Bits that flip and files that are cut, in the database and in packs: found, named, and told apart
from what is whole.

A reader gets what was stored or a ``UserError``, never something else; ``verify`` names what a
reader may not have met.
"""

import contextlib
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.catalog.records.lookup import Resolved
from mint_jax.catalog.storage.pack_format import FOOTER
from mint_jax.errors import UserError
from tests.catalog.adapters import OTHER, SCHEMA, packed
from tests.catalog.conftest import execute, same_bytes
from tests.catalog.postgres import Server

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


def look(
    place: Path | str, truth: dict, payloads: Path | None = None
) -> tuple[set[str], list[str]]:
    """Which names were refused, and what ``verify`` found. Whatever resolves must be the truth."""
    refused: set[str] = set()
    try:
        with Catalog.open(place, payloads) as catalog:
            for name in NAMES:
                try:
                    found = catalog.resolve(name)
                except UserError:
                    refused.add(name)
                    continue
                expected = truth[name]
                assert (found.policy, found.number, found.digest, found.schema) == (
                    expected.policy,
                    expected.number,
                    expected.digest,
                    expected.schema,
                ), f"{name} is {found}"
                try:
                    assert catalog.store.read(found.place, found.digest) is not None
                except UserError:
                    refused.add(name)
            return refused, [finding.what for finding in catalog.verify()]
    except UserError as error:
        told = str(error)
    assert told.startswith("database ")
    assert ("catalog.db" if payloads is None else "/test_") in told  # which one
    return set(NAMES), [told]


@pytest.mark.parametrize("times", [40, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_flipped_bit_of_the_database_is_never_another_answer(whole, tmp_path, choice, times):
    folder, truth = whole
    here = tmp_path / "catalog"
    shutil.copytree(folder, here)
    data = (folder / "catalog.db").read_bytes()
    used = [at for at, byte in enumerate(data) if byte]
    noticed = 0
    for _ in range(times):
        damaged = bytearray(data)
        at, bit = choice.choice(used), 1 << choice.randrange(8)
        damaged[at] ^= bit
        (here / "catalog.db").write_bytes(damaged)
        refused, found = look(here, truth)
        assert found or not refused, (
            f"bit {bit} of byte {at}: {refused} are refused and verify finds nothing"
        )
        noticed += bool(found)
    assert noticed


@pytest.mark.long
def test_a_flipped_bit_of_the_files_header_is_never_another_answer(whole, tmp_path):
    """Among others the number of the schema's format: SQLite says "unsupported file format"."""
    folder, truth = whole
    shutil.copytree(folder, tmp_path / "catalog")
    data = (folder / "catalog.db").read_bytes()
    # page size, versions of the format, fractions; formats, encoding
    for at in [*range(16, 24), *range(44, 60)]:
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            (tmp_path / "catalog" / "catalog.db").write_bytes(damaged)
            refused, found = look(tmp_path / "catalog", truth)
            assert found or not refused, (
                f"bit {bit} of byte {at}: {refused} are refused and verify finds nothing"
            )


def test_a_payload_that_lies_nowhere_is_found(whole, tmp_path):
    """A bit of a row's header turns ``pack_id`` into what SQLite reads as NULL, and does not
    mind.
    """
    folder, truth = whole
    shutil.copytree(folder, tmp_path / "catalog")
    data = bytearray((folder / "catalog.db").read_bytes())
    digest = truth["p@1"].digest
    # before the row's values stand their types: a blob of 32 (0x4c), schema_id and pack_id the
    # constant 1 (9), four more
    types = re.search(rb"\x4c\x09\x09.{4}" + re.escape(bytes.fromhex(digest)), data, re.DOTALL)
    assert types is not None
    data[types.start() + 2] ^= 2
    (tmp_path / "catalog" / "catalog.db").write_bytes(data)
    refused, found = look(tmp_path / "catalog", truth)
    assert refused
    assert any("has lost its payload's" in what for what in found)


def test_a_cut_database_is_named(whole, tmp_path, choice):
    folder, truth = whole
    here = tmp_path / "catalog"
    shutil.copytree(folder, here)
    data = (folder / "catalog.db").read_bytes()
    for _ in range(6):
        (here / "catalog.db").write_bytes(data[: choice.randrange(1, len(data) - 1)])
        _, found = look(here, truth)
        assert found


def test_a_damaged_log_of_the_database_loses_its_end_and_says_so(tmp_path, choice):
    """SQLite's log has checksums: what lies behind the damage is as if never committed, what lies
    before is whole.
    """
    catalog = Catalog.open(tmp_path / "whole")
    for step in range(12):
        catalog.export("p", packed(step), step, create=True)
    log = tmp_path / "whole" / "catalog.db-wal"
    data = log.read_bytes()
    losses = 0
    for _ in range(12):
        here = tmp_path / "damaged"
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", here, ignore=shutil.ignore_patterns("*-shm"))
        damaged = bytearray(data)
        damaged[choice.randrange(32, len(data))] ^= 1 << choice.randrange(8)
        (here / log.name).write_bytes(
            damaged if choice.random() < 0.5 else data[: choice.randrange(len(data))]
        )
        packs = sorted(here.rglob("*.pack"))
        with Catalog.open(here) as found:
            revisions = found.revisions("p") if found.stats()["policies"] else []
            assert [one.number for one in revisions] == list(range(1, len(revisions) + 1))
            for one in revisions:
                assert same_bytes(found.load(f"p@{one.number}"), packed(one.step))
            findings = [finding.what for finding in found.verify()]
            assert bool(findings) == (len(revisions) < 12), findings
            if findings:
                losses += 1
                assert "of the audit log were committed and are gone" in findings[0]
                with pytest.raises(
                    UserError, match=r"are gone: .*gc --accept-losses; nothing was removed"
                ):
                    found.gc(grace_s=0.0)
                # work goes on
                found.export("p", packed(len(revisions)), len(revisions), create=True)
        with Catalog.open(here) as found:
            assert [finding.what for finding in found.verify()] == findings, (
                "until somebody accepts it"
            )
            assert {*packs} <= {*here.rglob("*.pack")}
            found.gc(grace_s=0.0, accept_losses=True)
            assert list(found.verify()) == []
    assert losses
    catalog.close()


def test_an_older_copy_of_the_database_is_noticed(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        catalog.export("p", packed(1), 1, create=True)
    older = (tmp_path / "catalog.db").read_bytes()
    with Catalog.open(tmp_path) as catalog:
        catalog.export("p", packed(2), 2)
        catalog.promote("p", 2)
    (tmp_path / "catalog.db").write_bytes(older)
    with Catalog.open(tmp_path) as catalog:
        [finding] = catalog.verify()
        assert "entries 3 to 4 of the audit log were committed and are gone" in finding.what
    with Catalog.open(tmp_path) as catalog:
        assert len(list(catalog.verify())) == 1, "told once"


@pytest.mark.parametrize("note", [None, b"", b"x", b"nonsense" * 2, bytes(16), b"\x09" + bytes(15)])
def test_a_damaged_witness_accuses_nobody(tmp_path, note):
    with Catalog.open(tmp_path) as catalog:
        catalog.export("p", packed(1), 1, create=True)
    seen = tmp_path / "catalog.db.seen"
    if note is None:
        seen.unlink()
        seen.mkdir()  # cannot be kept
    else:
        seen.write_bytes(note)
    with Catalog.open(tmp_path) as catalog:
        assert list(catalog.verify()) == []
        catalog.export("p", packed(2), 2)
        assert catalog.database.lost() is None
    assert note is None or seen.stat().st_size == 16


@pytest.mark.parametrize(
    "times", [pytest.param(12, marks=pytest.mark.long), pytest.param(400, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_in_a_servers_files_is_never_another_answer(tmp_path, choice, times):
    """A cluster with checksums of its pages, stopped in good order, changed on disk, and started
    again.
    """
    server = Server()
    try:
        url, payloads = server.new_database(), tmp_path / "payloads"
        with Catalog.open(url, str(payloads)) as catalog:
            truth = fill(catalog)
            with catalog.database.engine.connect() as connection:
                query = """SELECT pg_relation_filepath(oid) FROM pg_class WHERE relkind IN ('r', 'i')
                           AND relnamespace = 'public'::regnamespace AND pg_relation_size(oid) > 0"""  # noqa: E501
                files = [server.data / path for (path,) in connection.exec_driver_sql(query)]
        server.halt(signal.SIGINT)
        whole = {path: path.read_bytes() for path in files}
        used = [(path, at) for path, data in whole.items() for at, byte in enumerate(data) if byte]
        noticed = 0
        for _ in range(times):
            path, at = choice.choice(used)
            data, bit = bytearray(whole[path]), 1 << choice.randrange(8)
            data[at] ^= bit
            path.write_bytes(data)
            server.start()
            refused, found = look(url, truth, payloads)
            if found:
                noticed += 1
                # removes nothing, or knows better
                with contextlib.suppress(UserError), Catalog.open(url, str(payloads)) as catalog:
                    catalog.gc(grace_s=0.0, compact=False)
            assert found or not refused, (
                f"bit {bit} of byte {at} of {path.name}: {refused} are refused and verify finds"
                " nothing"
            )
            server.halt(signal.SIGINT)
            for other, before in whole.items():
                other.write_bytes(before)
            assert {one.place.pack for one in truth.values()} <= {
                file.stem for file in payloads.rglob("*.pack")
            }
        assert noticed
    finally:
        server.stop()


CHANGES = {
    "revisions": [
        "number = number + 50",
        "step = step + 1",
        "pinned = NOT pinned",
        "state = 'retired'",
        "policy_id = 3, number = 77",
    ],
    "policies": [
        "keep_last = 1",
        "state = 'retired'",
        "name = 'another'",
        "last_number = 3",
        "session_number = 9",
    ],
    "aliases": ["revision_id = 1 + revision_id % 8", "version = version + 1", "name = 'beta'"],
    "audit": ["after = after % 8 + 1", "alias = 'other'", "details = '{}'", "details = 'no json'"],
    "payloads": ['"offset" = "offset" + 64', "length = length - 64", "pack_id = pack_id % 8 + 1"],
    "packs": ["name = 'f' || substr(name, 2)"],
    "schemas": ["json = replace(json, '2.0', '3.0')"],
}


@pytest.mark.parametrize(
    ("table", "change"), [(table, change) for table, some in CHANGES.items() for change in some]
)
def test_a_row_that_somebody_changed_is_found(catalog, table, change):
    """Behind the catalog's back, indexes and all: the audit log, the digests and the packs say
    otherwise.
    """
    for step in range(8):
        catalog.export_many(
            [Export(policy, packed(10 * step + i), step) for i, policy in enumerate(POLICIES)],
            create=True,
        )
    catalog.promote("p", 5)
    assert list(catalog.verify()) == []
    where = {
        "payloads": "length > 0 AND pack_id = 2",
        "audit": "id = (SELECT max(id) FROM audit)",
    }.get(table, "id = 1")
    where = "policy_id = 1 AND name = 'serving'" if table == "aliases" else where
    execute(catalog, f"UPDATE {table} SET {change} WHERE {where}")
    findings = list(catalog.verify())
    assert findings
    if table in ("revisions", "policies", "aliases"):
        assert all(finding.kind != "payload" for finding in findings)
    for i, policy in enumerate(POLICIES[1:], start=1):  # others go on
        if table in ("policies", "aliases", "audit"):
            assert same_bytes(catalog.load(f"{policy}@7"), packed(60 + i))


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


@pytest.mark.parametrize("how", ["flip", "cut", "trailer", "footer", "gone"])
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
        size = choice.randrange(1, len(data) - FOOTER.size)
        data, hit = data[:size], {name for name, end in ends.items() if end > size}
    elif how == "trailer":
        data[choice.randrange(len(data) - FOOTER.size - 48 * 6, len(data) - FOOTER.size)] ^= (
            1 << choice.randrange(8)
        )
    elif how == "footer":
        data[choice.randrange(len(data) - 32, len(data))] ^= 1 << choice.randrange(8)
    path.chmod(0o644)
    path.write_bytes(data)
    if how == "gone":
        path.unlink()
        hit = set(ends)
    findings = list(catalog.verify())
    assert {name for finding in findings for name in finding.revisions} == {
        f"{name}@1" for name in hit
    }
    if how != "flip":
        assert any(
            finding.kind == "pack" and where["a0"].place.pack in finding.what
            for finding in findings
        )
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
