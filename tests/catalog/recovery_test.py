"""What lies in packs and is in no record: found again, told apart from what is no adapter, and made
once.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import digest_of
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from tests.catalog.adapters import packed
from tests.catalog.conftest import execute, same_bytes

HOUR = 3600.0


def digest(value: int) -> str:
    return digest_of(packed(value))


def test_a_lost_database_costs_the_names_only(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        catalog.export_many([Export(f"p{i}", packed(i), 1) for i in range(5)], create=True)
        catalog.export("p0", packed(10), 2)
        catalog.rollout("p0", 2, b"tokens, and no adapter", tokens=3, mean_reward=0.5)
    (tmp_path / "catalog.db").unlink()
    with Catalog.open(tmp_path) as catalog:
        assert catalog.stats()["revisions"] == 0
        assert any("are gone" in finding.what for finding in catalog.verify())
        with pytest.raises(UserError, match="nothing was removed"):
            catalog.gc(grace_s=0.0)
        assert catalog.recover(dry_run=True, grace_s=HOUR).revisions == [], (
            "a writer may be about to commit them"
        )
        foretold = catalog.recover(dry_run=True, grace_s=-1.0)
        assert catalog.stats()["revisions"] == 0
        report = catalog.recover(grace_s=-1.0, why="the disk of the database died")
        assert report.revisions == foretold.revisions
        assert {one["digest"] for one in report.revisions} == {digest(i) for i in (*range(5), 10)}
        [left] = report.left
        assert "not a packed adapter" in left or "safetensors" in left or "header" in left, left
        for one in report.revisions:
            data = catalog.load(f"{one['name']}@latest")
            assert digest_of(data) == one["digest"] == catalog.resolve(str(one["digest"])).digest
            assert len(data) == one["bytes"]
        assert catalog.recover(grace_s=-1.0).revisions == [], "once"
        catalog.gc(grace_s=0.0, accept_losses=True)
        assert list(catalog.verify()) == []
        assert same_bytes(catalog.load(digest(10)), packed(10))


def test_what_records_name_is_not_recovered(catalog, place, clock):
    catalog.export_many([Export(f"p{i}", packed(i), 1) for i in range(4)], create=True)
    clock.now += 2 * HOUR
    assert catalog.recover(grace_s=-1e12).revisions == []
    execute(catalog, "DELETE FROM aliases WHERE policy_id = 2")
    execute(catalog, "DELETE FROM revisions WHERE policy_id = 2")
    where = "SELECT digest FROM revisions"
    execute(catalog, f"DELETE FROM payloads WHERE digest NOT IN ({where})")
    report = catalog.recover("lab/found-{digest}", grace_s=-1e12)
    assert [one["name"] for one in report.revisions] == [f"lab/found-{digest(1)[:32]}"]
    assert same_bytes(catalog.load(f"lab/found-{digest(1)[:32]}"), packed(1))
    assert catalog.audit(str(report.revisions[0]["name"]))[0].action == "create"


def test_damage_is_left_and_named(tmp_path):
    with Catalog.open(tmp_path) as catalog:
        for i in range(3):
            catalog.export(f"p{i}", packed(i), 1, create=True)
        packs = {i: catalog.resolve(f"p{i}").place for i in range(3)}
    for file in tmp_path.glob("catalog.db*"):
        file.unlink()
    paths = {path.stem: path for path in Path(tmp_path).rglob("*.pack")}
    flipped, cut = paths[packs[0].pack], paths[packs[1].pack]
    data = bytearray(flipped.read_bytes())
    data[packs[0].offset + 100] ^= 1
    flipped.chmod(0o644)
    flipped.write_bytes(data)
    cut.chmod(0o644)
    cut.write_bytes(cut.read_bytes()[:100])
    with Catalog.open(tmp_path) as catalog:
        report = catalog.recover(grace_s=-1.0)
        assert [one["digest"] for one in report.revisions] == [digest(2)]
        assert sorted(what.split(":")[0] for what in report.left) == sorted(
            [digest(0)[:12], f"pack {packs[1].pack}"]
        )
        assert np.array_equal(catalog.load(digest(2)), np.frombuffer(packed(2), np.uint8))


def test_a_copied_pack_makes_no_second_policy(tmp_path):
    for name in ("a", "b"):
        with Catalog.open(tmp_path / name) as catalog:
            catalog.export("p", packed(7), 1, create=True)
    for path in (tmp_path / "b" / "payloads").rglob("*.pack"):
        target = tmp_path / "a" / path.relative_to(tmp_path / "b")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for file in (tmp_path / "a").glob("catalog.db*"):
        file.unlink()
    with Catalog.open(tmp_path / "a") as catalog:
        assert len(list(catalog.store.packs())) == 2
        assert len(catalog.recover(dry_run=True, grace_s=-1.0).revisions) == 1
        assert len(catalog.recover(grace_s=-1.0).revisions) == 1
        assert catalog.stats()["policies"] == 1


def test_a_template_needs_the_digest(catalog):
    with pytest.raises(UserError, match=r"template is 'again'; expected one with \{digest\}"):
        catalog.recover("again")
