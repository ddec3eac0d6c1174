"""Stand-ins of policies in the catalog, on both databases, and the command that names them."""

import json

import pytest

from mint_jax.catalog.cli.main import main
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError
from tests.catalog.adapters import packed


def test_every_name_of_a_policy_resolves_with_its_stand_in(catalog):
    for name, i in (("a", 0), ("a", 1), ("m", 2)):
        catalog.export(name, packed(i), i, create=True)
    catalog.promote("a", 1)
    digest = catalog.resolve("m").digest
    assert catalog.stand_in("a", "m@1", why="of its family") == digest
    names = ["a", "a@1", "a@serving", catalog.resolve("a@2").digest]
    assert [catalog.resolve(name).stand_in for name in names] == [digest] * 4
    assert [one.stand_in for one in catalog.resolve_many(["a@serving", "m"])] == [digest, None]
    assert catalog.policy("a").stand_in == digest
    entry = catalog.audit("a")[-1]
    assert (entry.action, entry.details["named"], entry.why) == ("stand in", "m@1", "of its family")
    assert catalog.stand_in("a", None) is None
    assert catalog.resolve("a").stand_in is None


def test_what_cannot_stand_in_is_refused(catalog):
    catalog.export("a", packed(0), 0, create=True)
    catalog.export("t/b", packed(1), 0, create=True)
    catalog.export("m", packed(2), 0, create=True)
    with pytest.raises(UserError, match="not in the catalog"):
        catalog.stand_in("a", "unknown")
    with pytest.raises(UserError, match="not in the catalog"):
        catalog.stand_in("c", "m")
    with pytest.raises(UserError):  # another tenant's
        catalog.stand_in("a", "t/b@1")
    catalog.retire("m")
    with pytest.raises(UserError, match="retired"):
        catalog.stand_in("a", "m")
    assert catalog.policy("a").stand_in is None


def test_the_command_names_and_removes(tmp_path, capsys):
    with Catalog.open(tmp_path) as catalog:
        for i, name in enumerate("am"):
            catalog.export(name, packed(i), i, create=True)
        digest = catalog.resolve("m").digest

    def run(*words: str) -> dict:
        assert main([f"--catalog={tmp_path}", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    assert run("stand-in", "a", "m") == {"policy": "a", "stand_in": digest}
    assert run("show", "a")["policy"]["stand_in"] == digest
    assert run("stand-in", "a")["stand_in"] is None
