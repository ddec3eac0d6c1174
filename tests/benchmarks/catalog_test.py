"""A filled catalog holds the payloads of its plan."""

import pytest

from benchmarks.catalog_fill import BASE, FORMS, Payloads, Plan, fill, open_catalog
from mint_jax.catalog.packed import digest_of, unpack
from mint_jax.lora import tree as lora_tree


@pytest.mark.parametrize("form", FORMS)
def test_a_filled_catalog_holds_what_its_plan_says(tmp_path, form):
    plan = Plan(entries=23, per_policy=4, batch=7, seed=3, form=form)
    report = fill(tmp_path, plan)
    assert (report["entries"], report["policies"]) == (23, 6)
    payloads = Payloads(plan.seed, FORMS[form])
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
    assert (schema.base, schema.config) == (BASE, FORMS[form].adapter)
    lora_tree.check_fits(adapter, schema.config, FORMS[form].specs, "it")
