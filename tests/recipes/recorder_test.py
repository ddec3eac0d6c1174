"""A run and the catalog: one writer per policy, and taking up again after a kill."""

import dataclasses
import os

import numpy as np
import pytest

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from mint_jax.harness.adapters import JobCatalog
from mint_jax.harness.recorder import Snapshot, claim_policies
from mint_jax.lora.tree import AdapterConfig

SCHEMA = Schema("ab" * 32, AdapterConfig(1, 2.0, ("q",)))


def snapshot(value: float) -> Snapshot:
    return Snapshot({"dense": {"q": {"a": np.full((1, 1, 8), value, np.float32)}}}, SCHEMA, 1)


@pytest.fixture
def catalog(tmp_path):
    opened = JobCatalog(tmp_path / "catalog", create=True)
    yield opened
    opened.close()


def claimed(catalog, folder, names=("p", "team/q"), schema=SCHEMA, fixed=()):
    """Claims policies as a process that begins."""
    folder.mkdir(exist_ok=True)
    schemas = dict.fromkeys(names, schema)
    return claim_policies(catalog, schemas, folder / "run.json", dict(fixed))


def export(writer, step, value):
    def write():
        named = enumerate(writer.sessions.items())
        exports = [Export(n, snapshot(value + i).data, step, s, "test") for i, (n, s) in named]
        writer.catalog.export_many(exports)

    writer.put(write)


def test_one_run_at_a_time_writes_a_policy(catalog, tmp_path):
    first = claimed(catalog, tmp_path / "a").writer
    says = rf"policy 'p' is being trained by 'run [0-9a-f]{{32}} on .*, process {os.getpid()}"
    with pytest.raises(UserError, match=says):
        claimed(catalog, tmp_path / "b", names=("other", "p"))
    assert catalog.main.policy("other").session_owner is None, "the refused run has none"
    export(first, 1, 10.0)
    first.drain()
    again = claimed(catalog, tmp_path / "a").writer  # the same workdir, as after a kill
    export(first, 2, 20.0)
    with pytest.raises(UserError, match="was fenced off by session 2"):
        first.drain()
    with pytest.raises(UserError, match="was fenced off"):
        export(first, 3, 30.0)
    first.stop()
    export(again, 2, 21.0)
    again.stop()
    assert [r.step for r in catalog.main.revisions("p")] == [1, 2]
    assert catalog.main.resolve("team/q").digest == snapshot(22.0).digest
    other = claimed(catalog, tmp_path / "b")  # a run that ended gave its policies back
    began = {name: one["digest"] for name, one in other.start.items()}
    assert began == {"p": snapshot(21.0).digest, "team/q": snapshot(22.0).digest}
    other.writer.stop()


def test_a_fixed_revision_is_looked_up_once_and_leased(catalog, tmp_path):
    def teach(step):
        source = claimed(catalog, tmp_path / "a").writer
        export(source, step, float(step))
        source.stop()

    def student():
        return claimed(catalog, tmp_path / "b", names=("student",), fixed={"student": "p@latest"})

    teach(1)
    first = student()
    assert first.fixed == {"student": snapshot(1.0).digest}
    catalog.main.keep_last("p", 1)
    teach(2)
    catalog.main.gc(grace_s=0.0)
    catalog.main.load(first.fixed["student"])  # retention gave it up, the lease keeps it
    again = student()
    assert again.fixed == first.fixed, "the alias moved, the run's source did not"
    for claim in (again, first):
        claim.writer.stop()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base": "cd" * 32}, "is of base abababababab, this run's is cdcdcdcdcdcd"),
        ({"config": AdapterConfig(2, 2.0, ("q",))}, "has rank 1, this config says 2"),
    ],
)
def test_another_schema_is_refused_before_anything_is_written(change, says, catalog, tmp_path):
    claimed(catalog, tmp_path / "a").writer.stop()
    with pytest.raises(UserError, match=says):
        claimed(catalog, tmp_path / "b", schema=dataclasses.replace(SCHEMA, **change))
