"""Stale reads are found, and a filled catalog holds the payloads of its plan."""

import numpy as np
import pytest

from benchmarks.catalog_fill import ADAPTER, BASE, Payloads, Plan, base_specs, fill, open_catalog
from benchmarks.switch import Move, judge
from mint_jax.catalog.packed import digest_of, unpack
from mint_jax.lora import tree as lora_tree

MOVES = [  # the policies' indices, when the moves began and ended, what they moved to
    Move(0, 100, 200, 2, "promote"),
    Move(1, 250, 290, 4, "promote"),
    Move(0, 300, 400, 3, "promote"),
    Move(0, 500, 600, 2, "rollback"),
]


def stale(*read):
    return judge(MOVES, np.array([read], np.int64), first=1)["stale_reads"]


@pytest.mark.parametrize(
    ("read", "found"),
    [
        ((0, 150, 160, 1), 0),  # during a move, either side
        ((0, 150, 160, 2), 0),
        ((0, 50, 450, 1), 0),
        ((0, 50, 450, 3), 0),
        ((0, 201, 210, 1), 1),  # the move to 2 had returned
        ((0, 410, 550, 2), 0),  # 2 again may be the rollback that was under way
        ((0, 410, 490, 2), 1),
        ((0, 10, 50, 2), 1),  # from the future
        ((1, 291, 300, 1), 1),
    ],
)
def test_stale_reads_are_found(read, found):
    assert stale(*read) == found


def test_a_filled_catalog_holds_what_its_plan_says(tmp_path):
    plan = Plan(entries=23, per_policy=4, batch=7, seed=3)
    report = fill(tmp_path, plan)
    assert (report["entries"], report["policies"]) == (23, 6)
    payloads = Payloads(plan.seed)
    digests = [
        digest_of(data)
        for n, batch in enumerate(plan.batches())
        for data in payloads.batch(n, len(batch))
    ]
    assert len(set(digests)) == 23
    with open_catalog(tmp_path) as catalog:
        for k, digest in enumerate(digests):
            assert catalog.resolve(f"{plan.policy(k)}@{k // plan.policies + 1}").digest == digest
        for policy in range(plan.policies):
            assert catalog.resolve(f"{plan.policy(policy)}@latest").number == plan.newest(policy)
        adapter, schema = unpack(catalog.load(plan.policy(5)))
    assert (schema.base, schema.config) == (BASE, ADAPTER)
    lora_tree.check_fits(adapter, schema.config, base_specs(), "it")
