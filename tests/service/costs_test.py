"""What policies cost: the parts of all dispatches sum to what was measured, reach the disk, and are
told to operators.
"""

import functools
import io
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from tinker import types

from mint_jax import top
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.service.costs import BASE, KINDS, Cost, Costs, Payer
from mint_jax.service.server_db import ServerDatabase
from tests.service.sites import datum_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.train.live_test import random_data

SAMPLING = types.SamplingParams(max_tokens=16)


@pytest.fixture
def database(tmp_path):
    with ServerDatabase(tmp_path / "server.db") as database:
        yield database


def random_shares(rng):
    payers = [Payer(tenant, policy) for tenant in "ab" for policy in ("p", "q", BASE)]
    return {
        payers[i]: int(rng.integers(1, 300))
        for i in rng.choice(len(payers), int(rng.integers(1, 6)), replace=False)
    }


def test_parts_sum_to_the_whole_and_are_each_ones_own(rng, database):
    costs, seconds, tokens = Costs(database), {}, {}
    for i in range(200):
        kind, took, shares = str(rng.choice(KINDS)), float(rng.exponential()), random_shares(rng)
        costs.charge(kind, took, shares)
        for (tenant, policy), share in shares.items():
            part = took * share / sum(shares.values())
            for key in ("tenant", tenant), ("policy", policy):
                seconds[key] = seconds.get(key, 0.0) + part
                tokens[key] = tokens.get(key, 0) + share * (kind in ("prefill", "decode", "train"))
        if i % 50 == 0:
            costs.flush()
    found = {("policy", name): cost for name, cost in costs.listed("policy").items()}
    found |= {("tenant", name): cost for name, cost in costs.listed("tenant").items()}
    assert {key: cost.tokens for key, cost in found.items()} == tokens
    for key, cost in found.items():
        assert cost.seconds == pytest.approx(seconds[key], rel=1e-9)
    assert sum(cost.seconds for cost in costs.listed("policy").values()) == pytest.approx(
        costs.measured_s, rel=1e-9
    )
    order = list(costs.listed("policy"))
    assert order == sorted(order, key=lambda name: -seconds["policy", name])
    assert [*costs.listed("policy", limit=2), *costs.listed("policy", limit=2, offset=2)] == order
    assert costs.of(["p", "nobody's"]) == {"p": costs.listed("policy")["p"], "nobody's": Cost()}


def test_a_database_that_cannot_be_written_loses_nothing(database, monkeypatch):
    costs = Costs(database)
    costs.charge("train", 1.0, {Payer("a", "p"): 10})
    with monkeypatch.context() as patch:

        def busy(apply):
            costs.charge("train", 1.0, {Payer("a", "p"): 10})  # meanwhile
            raise DatabaseFailed("server.db is locked")

        patch.setattr(database, "write", busy)
        with pytest.raises(DatabaseFailed, match="locked"):
            costs.flush()
    assert costs.listed("policy") == {"p": Cost(train_s=2.0, train_tokens=20)}


def clocked(monkeypatch, thing, name, into):
    """Measures each call of a method on its own."""
    call = getattr(thing, name)

    @functools.wraps(call)
    def measured(*args, **kwargs):
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - began)

    monkeypatch.setattr(thing, name, measured)


@pytest.fixture
def worked(rng, site, monkeypatch):
    """Two policies that trained, were sampled beside the base, what the calls of the devices took
    by a clock beside, and costs before.
    """
    took, live, calls = [], site.server.live, site.server.engine.calls
    for thing, name in (
        (live, "step"),
        (live, "optim"),
        (calls, "prefill"),
        (calls, "block_until_ready"),
        (calls, "decode"),
    ):
        clocked(monkeypatch, thing, name, took)
    before = (
        sum(cost.seconds for cost in site.server.costs.listed("policy").values()),
        site.server.costs.measured_s,
    )
    began = time.perf_counter()
    trainers = [site.trainer() for _ in range(2)]
    asked = []
    for trainer in trainers:
        for _ in range(3):
            data = [datum_of(one) for one in random_data(rng, "cross_entropy", 24)]
            asked += [
                trainer.forward_backward(data, "cross_entropy"),
                trainer.optim_step(types.AdamParams(learning_rate=1e-3)),
            ]
    for one in asked:
        one.result()
    samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]
    samplers.append(site.client().create_sampling_client(base_model=site.server.name).result())
    prompt = types.ModelInput.from_ints(rng.integers(3, 97, 40).tolist())
    for one in [sampler.sample(prompt, 2, SAMPLING) for sampler in samplers]:
        one.result()
    return trainers, took, time.perf_counter() - began, before


@pytest.mark.long
def test_a_servers_costs_are_what_its_loop_took(site, worked):
    trainers, took, wall_s, (before, measured_before) = worked
    costs = site.server.costs
    found = costs.listed("policy")
    names = [trainer.model_id for trainer in trainers]
    assert {*names, BASE} <= set(found), "what is sampled of a policy's revision is the policy's"
    for name in names:
        assert all(getattr(found[name], f"{kind}_s") > 0 for kind in KINDS), found[name]
        assert found[name].decode_tokens == 32
    assert found[BASE].decode_tokens >= 32
    assert found[BASE].train_s == 0
    total = sum(cost.seconds for cost in found.values()) - before
    assert total == pytest.approx(costs.measured_s - measured_before, rel=1e-6)
    assert sum(cost.seconds for cost in costs.listed("tenant").values()) - before == pytest.approx(
        total, rel=1e-6
    )
    assert total <= wall_s, "one thread computes: no second is told twice"
    # By another clock; what waits for the host's cores between two calls is in one of the two.
    assert total >= 0.5 * sum(took), "and those of the devices are told"


def test_operators_see_costs_in_pages_and_by_tenant(site, worked):
    costs = site.server.costs

    def get(query):
        return httpx.get(f"{site.url}/admin/costs{query}")

    whole, page = get("?limit=1000").json(), get("?limit=1").json()
    assert {one["policy"]: one["seconds"] for one in whole["costs"]} == {
        k: v.seconds for k, v in costs.listed("policy").items()
    }
    assert not whole["has_more"]
    assert page == {"costs": whole["costs"][:1], "has_more": True}
    assert get("?limit=1&offset=1").json()["costs"] == whole["costs"][1:2]
    assert get("?by=tenant").json()["costs"] == [
        {"tenant": "default"} | costs.listed("tenant")["default"].to_json()
    ]
    assert get("?tenant=nobody").json()["costs"] == []
    for wrong in (
        "?by=x",
        "?limit=0",
        "?limit=1001",
        "?offset=-1",
        "?limit=9" + "9" * 400,
        "?by=tenant&tenant=a",
    ):
        assert get(wrong).status_code == 400, wrong
    families = {
        f.name: f for f in text_string_to_metric_families(httpx.get(site.url + "/metrics").text)
    }
    seconds = {
        (s.labels["tenant"], s.labels["kind"]): s.value
        for s in families["mint_device_seconds"].samples
    }
    assert sum(seconds.values()) == pytest.approx(costs.measured_s, rel=1e-6)
    assert {tenant for tenant, _ in seconds} == {"default"}


def printed(site, *arguments):
    out = io.StringIO()
    status = top.main(
        [f"--url={site.url}", "--interval=0.05", *arguments], Console(file=out, width=200)
    )
    return status, out.getvalue()


def test_top_prints_one_table(site, worked, capsys):
    status, text = printed(site, "--once")
    assert status == 0
    for trainer in worked[0]:
        [line] = [line for line in text.splitlines() if trainer.model_id in line]
        assert f"{site.server.costs.listed('policy')[trainer.model_id].seconds:.2f}" in line
    assert f"{sum(site.server.live.capacity.values())} slots" in text or "in slot" in text
    assert top.main(["--once", "--url=http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9/debug/state does not answer" in capsys.readouterr().err
    assert top.main(["--once", "--url=127.0.0.1"]) == 2
    assert top.main(["--once", f"--url={site.url}/no"]) == 1
    assert "answers 404" in capsys.readouterr().err
