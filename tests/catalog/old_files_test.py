"""A catalog that an earlier commit made opens, says what it said, and goes on.

``files/catalog_of_33b0373.json`` is its database as SQL, its packs, and what every name stood for,
written by that commit's code.
"""

import base64
import json
import sqlite3
from pathlib import Path

import pytest

from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.records import tables
from mint_jax.errors import UserError
from tests.catalog.adapters import packed
from tests.catalog.conftest import same_bytes

FILES = sorted((Path(__file__).parent / "files").glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def old(request, tmp_path):
    """The folder of an old catalog, and what was in it."""
    kept = json.loads(request.param.read_text())
    database = sqlite3.connect(tmp_path / "catalog.db")
    database.executescript("\n".join(kept["sql"]))
    assert (
        database.execute(f"SELECT version_num FROM {tables.VERSION_TABLE}").fetchone()[0]
        < tables.HEAD
    )
    database.close()
    for name, data in kept["packs"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(base64.b64decode(data))
    return tmp_path, kept


def test_an_old_catalog_says_what_it_said(old):
    folder, kept = old
    with Catalog.open(folder) as catalog:
        for name, [number, digest] in kept["names"].items():
            found = catalog.resolve(name)
            assert (found.number, found.digest) == (number, digest)
            assert catalog.load(name).size > 0  # its digest verified
        assert same_bytes(catalog.load("chat@1"), packed(0))
        assert [[e.action, e.before, e.after, e.why] for e in catalog.history("chat")] == kept[
            "history"
        ]
        assert len(catalog.audit(limit=10_000)) == kept["audit"]
        assert list(catalog.verify()) == []
        assert catalog.revision("chat", 2).pinned
        assert catalog.policy("child").parent == "chat@2"
        assert catalog.revision("lab/math", 4).sampling == {"temperature": 0.5}
        assert [one.metrics for one in catalog.evaluations("chat@3")] == [{"score": 1.5}]
        assert [(one.step, one.place) for one in catalog.checkpoints("chat")] == [
            (3, "/checkpoints/3")
        ]
        [rollout] = catalog.rollouts("chat")
        assert same_bytes(catalog.read_rollout(rollout), packed(99))
        assert catalog.begin_operation("train", "key", {"a": 1})[1] is False
        with pytest.raises(UserError, match="removed by retention"):
            catalog.resolve("lab/math@1")


def test_an_old_catalog_goes_on(old):
    folder, kept = old
    with Catalog.open(folder) as catalog:
        made = catalog.export("chat", packed(50), 9)
        assert made.number == kept["names"]["chat@4"][0] + 1
        catalog.promote("chat", made.number, why="newer")
        catalog.rollback("chat")
        assert catalog.resolve("chat@serving").digest == kept["names"]["chat@serving"][1]
        catalog.tag("chat", {"team": "a"})
        catalog.rename("lab/math", "lab/sums")
        catalog.delete("child")
        catalog.restore("chat")
        catalog.gc(grace_s=0.0)
        assert list(catalog.verify()) == []
        assert same_bytes(
            catalog.load("chat@serving"), packed(kept["names"]["chat@serving"][0] - 1)
        )
