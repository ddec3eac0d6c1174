"""Revision cards: paired scores, norms against dense float64 deltas, and what is named absent."""

import json

import numpy as np
import pytest

from mint_jax.catalog.cards import squared_norm
from mint_jax.catalog.cli.main import main
from mint_jax.catalog.evidence import interval
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack
from mint_jax.catalog.records.exports import Export
from mint_jax.lora.basis import basis
from mint_jax.lora.tree import AdapterConfig

SCHEMA = Schema("ab" * 32, AdapterConfig(2, 4.0, ("q",)))
TRAINING = {"updates": 2, "tokens": 96, "effective": 0.9, "gap": 1e-4}
ABOUT = {"renderer": "r", "scorer": "digit_sum", "dataset": "ef" * 32, "seed": 3}


@pytest.mark.parametrize("experts", [(), (5,)])
@pytest.mark.parametrize("shared", [False, True])
def test_norms_are_those_of_dense_deltas(rng, experts, shared):
    def one(rank: int):
        a = rng.normal(size=(3, *(() if shared else experts), rank, 7)).astype(np.float32)
        return float(rng.normal()), a, rng.normal(size=(3, *experts, rank, 4)).astype(np.float32)

    deltas = [one(2), one(3)]
    dense = np.zeros((3, *experts, 4, 7))
    for scale, a, b in deltas:
        form = "lrd,lerf->lefd" if shared and experts else "...rd,...rf->...fd"
        dense += scale * np.einsum(form, a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(squared_norm(deltas), np.sum(dense**2), rtol=1e-12)
    (scale, a, b), _ = deltas
    assert squared_norm([(scale, a, b), (-scale, a, b)]) < 1e-24 * squared_norm([(scale, a, b)])


@pytest.fixture
def folder(tmp_path, rng):
    """A catalog whose policy ``p`` has two revisions, the second with metrics of its training."""
    with Catalog.open(tmp_path) as catalog:
        for step in (0, 2):
            a, b = (rng.normal(size=(1, 2, n)).astype(np.float32) for n in (8, 6))
            data = pack({"dense": {"attn": {"q": {"a": a, "b": b}}}}, SCHEMA)
            training = TRAINING if step else None
            catalog.export_many([Export("p", data, step, training=training)], create=True)
    return tmp_path


def evaluate(catalog: Catalog, name: str, rewards, **change) -> None:
    metrics = {"samples": 2, "rewards": rewards}
    score = {"isolated": 0.5, "shared": 0.5, "metrics": metrics}
    catalog.record_evaluation(name, **ABOUT | change, **score)


def test_a_card_compares_a_revision_with_its_parent(folder):
    with Catalog.open(folder) as catalog:
        evaluate(catalog, "p@1", [[0.0, 0.5], [1.0, None], [0.25, 0.25], [None, None]])
        evaluate(catalog, "p@2", [[9.0, 9.0]], seed=4)  # of other seeds
        evaluate(catalog, "p@2", [[1.0, 1.0], [0.0, 1.0], [0.75, 0.25], [1.0, 1.0]])
        card = catalog.card("p", 2)
        differences = np.array([1.0 - 0.25, 0.5 - 1.0, 0.5 - 0.25])
        assert (card.score.prompts, card.score.scorer) == (3, "digit_sum")
        np.testing.assert_allclose(card.score.difference, differences.mean())
        low, high = interval((differences + 1) / 2)
        np.testing.assert_allclose((card.score.low, card.score.high), (2 * low - 1, 2 * high - 1))
        assert (card.training, card.parent.number, card.absent) == (TRAINING, 1, {})
        assert card.change.largest == "dense/attn/q"
        same = catalog.card("p", 2, parent=2).change
        assert same.norm < 1e-12 * card.change.norm
        assert same.share < 1e-12


def test_what_is_not_known_is_named(folder, capsys):
    with Catalog.open(folder) as catalog:
        evaluate(catalog, "p@1", [[0.5, 0.5]])
        assert catalog.card("p", 2).absent["score"].startswith("no evaluation of both")
        evaluate(catalog, "p@2", [[2.0, 2.0]])
        first, second = catalog.card("p", 1), catalog.card("p", 2)
        assert first.parent is None
        assert first.absent["score"] == "it has no parent in the catalog"
        assert second.absent["score"] == "rewards are from 0.5 to 2, not from 0 to 1"
        assert first.absent["training"] == "the export came without metrics of training"
    assert main([f"--catalog={folder}", "card", "p", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["revision"]["number"], shown["score"]) == (2, None)
    assert shown["training"] == TRAINING
    assert main([f"--catalog={folder}", "card", "p@2", "--parent=1"]) == 0
    assert "dense/attn/q" in capsys.readouterr().out
    assert main([f"--catalog={folder}", "show", "p@1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evaluations"][0]["metrics"] == {"samples": 2}


def change_of(folder, config, name, found):
    """The card's change from the first to the second of these revisions of ``q``."""
    with Catalog.open(folder) as catalog:
        for step, own in enumerate(found):
            data = pack({"dense": {"attn": {"q": {name: own}}}}, Schema("ab" * 32, config))
            catalog.export("p", data, step, create=True)
        return catalog.card("p", 2).change


def test_the_norm_of_a_bias_is_its_own(tmp_path, rng):
    found = rng.normal(size=(2, 3, 1, 6)).astype(np.float32)
    change = change_of(tmp_path, AdapterConfig(targets=("q",), kind="bias"), "bias", found)
    first, second = found.astype(np.float64)
    assert change.norm == pytest.approx(np.linalg.norm(second - first), rel=1e-12)
    assert change.share == pytest.approx(change.norm / np.linalg.norm(first), rel=1e-12)


def test_the_norm_over_an_output_basis_is_that_of_a(tmp_path, rng):
    """Near that of the whole delta: the basis's rows are nearly at right angles."""
    found = rng.normal(size=(2, 3, 2, 32)).astype(np.float32)
    change = change_of(tmp_path, AdapterConfig(2, 6.0, ("q",), kind="basis"), "a", found)
    first, second = 3.0 * found.astype(np.float64)
    assert change.norm == pytest.approx(np.linalg.norm(second - first), rel=1e-6)
    assert change.share == pytest.approx(change.norm / np.linalg.norm(first), rel=1e-6)
    b = basis("dense/attn/q", (3, 2, 4096)).astype(np.float64)
    whole = (second - first).swapaxes(1, 2) @ b
    # entries off the diagonal of B B^T are means of 4,096 signs
    assert change.norm == pytest.approx(np.linalg.norm(whole), rel=6 / 64)
