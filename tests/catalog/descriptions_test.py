"""Descriptions of policies in the catalog, on both databases, and the command that lists them."""

import json

import numpy as np
import pytest

from mint_jax.catalog.cli.main import main
from mint_jax.errors import UserError
from tests.catalog.adapters import packed


def vector(i: int) -> np.ndarray:
    return np.linspace(-1, i, 12).astype(np.float32)


def test_changes_are_read_in_their_order_and_later_ones_behind_a_place(catalog, clock):
    for i, name in enumerate(("a", "b", "t/c")):
        catalog.export(name, packed(i), i, create=True)
        catalog.describe(name, vector(i), i + 1)
        clock.now += 1
    first, place = catalog.descriptions(limit=2)
    assert [(one.policy, one.examples) for one in first] == [("a", 1), ("b", 2)]
    np.testing.assert_array_equal(first[1].vector, vector(1).astype(np.float16))
    rest, place = catalog.descriptions(since=place)
    assert [one.policy for one in rest] == ["t/c"]
    assert rest[0].base == catalog.policy("t/c").base
    assert catalog.descriptions(since=place) == ([], place)
    assert [one.policy for one in catalog.descriptions("t")[0]] == ["t/c"]
    catalog.describe("a", vector(9), 7)
    catalog.describe("b", None)
    again, _ = catalog.descriptions(since=place)
    assert [(one.policy, one.examples, one.vector.size) for one in again] == [
        ("a", 7, 12),
        ("b", 0, 0),
    ]
    assert len(catalog.descriptions()[0]) == 3, "one a policy"
    assert catalog.audit("b")[-1].action == "describe"


@pytest.mark.parametrize(
    ("wrong", "examples", "reason"),
    [
        (np.ones((2, 2)), 1, "shape"),
        (np.ones(0), 1, "shape"),
        (np.array([1.0, np.nan]), 1, "finite"),
        (np.array([np.inf]), 1, "finite"),
        (np.ones(1 << 17), 1, "shape"),
        (np.ones(3), 0, "examples is 0"),
    ],
)
def test_what_is_no_description_is_refused(catalog, wrong, examples, reason):
    catalog.export("a", packed(0), 0, create=True)
    with pytest.raises(UserError, match=reason):
        catalog.describe("a", wrong, examples)
    with pytest.raises(UserError, match="not in the catalog"):
        catalog.describe("b", np.ones(3), 1)
    assert catalog.descriptions() == ([], (0.0, 0))


def test_a_retired_policy_is_left_out_and_a_deleted_one_gone(catalog):
    catalog.export("a", packed(0), 0, create=True)
    catalog.describe("a", vector(0), 1)
    catalog.retire("a")
    assert catalog.descriptions()[0] == []
    catalog.delete("a")
    catalog.export("a", packed(1), 0, create=True)
    assert catalog.descriptions()[0] == []


def test_the_command_lists_and_removes(tmp_path, capsys):
    from mint_jax.catalog.lifecycle import Catalog

    with Catalog.open(tmp_path) as catalog:
        catalog.export("a", packed(0), 0, create=True)
        catalog.describe("a", vector(0), 3)

    def run(*words: str) -> dict:
        assert main([f"--catalog={tmp_path}", "descriptions", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    [row] = run()["descriptions"]
    assert (row["policy"], row["examples"], row["dims"]) == ("a", 3, 12)
    assert run("--remove=a", "--why=wrong")["examples"] == 0
    assert run()["descriptions"][0]["dims"] == 0
