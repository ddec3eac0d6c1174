"""What policies cost: the parts of all dispatches sum to what was measured, reach the disk, and are
told to operators.
"""

import asyncio
import collections
import datetime
import functools
import io
import json
import time
import types as builtin

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from starlette.requests import Request
from tinker import types

from mint_jax import top
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.errors import UserError
from mint_jax.models.paged import PAGE
from mint_jax.service.book import Book, Checkpoint
from mint_jax.service.costs import BASE, KINDS, Cost, Costs, Payer
from mint_jax.service.server_db import ServerDatabase
from mint_jax.service.tinker_rest import Rest
from pallas_kernels import dispatch
from tests.service.sites import datum_of
from tests.service.sites import site as site
from tests.service.sites import sites as sites
from tests.train.live_test import random_data

SAMPLING = types.SamplingParams(max_tokens=16)


@pytest.fixture
def database(tmp_path):
    with ServerDatabase(tmp_path / "server.db") as database:
        yield database


def test_parts_sum_to_the_whole_by_policy_and_tenant(rng, database):
    costs, seconds, tokens = Costs(database), collections.Counter(), collections.Counter()
    payers = [Payer(tenant, policy) for tenant in "ab" for policy in ("p", "q", BASE)]
    for i in range(200):
        kind, took = str(rng.choice(KINDS)), float(rng.exponential())
        chosen = rng.choice(len(payers), int(rng.integers(1, 6)), replace=False)
        shares = {payers[i]: int(rng.integers(1, 300)) for i in chosen}
        costs.charge(kind, took, shares)
        for (tenant, policy), share in shares.items():
            for key in ("tenant", tenant), ("policy", policy):
                seconds[key] += took * share / sum(shares.values())
                tokens[key] += share * (kind in ("prefill", "decode", "train"))
        if i % 50 == 0:
            costs.flush()
    found = {(by, n): cost for by in ("policy", "tenant") for n, cost in costs.listed(by).items()}
    assert {key: cost.tokens for key, cost in found.items()} == tokens
    # sums in another order
    assert {key: cost.seconds for key, cost in found.items()} == pytest.approx(seconds, rel=1e-9)
    policies = costs.listed("policy")
    whole = sum(cost.seconds for cost in policies.values())
    assert whole == pytest.approx(costs.measured_s, rel=1e-9)
    order = list(policies)
    assert order == sorted(order, key=lambda name: -seconds["policy", name])
    assert [*costs.listed("policy", limit=2), *costs.listed("policy", limit=2, offset=2)] == order
    assert costs.of(["p", "nobody's"]) == {"p": policies["p"], "nobody's": Cost()}


def answer(handler, path_query):
    scope = {"type": "http", "query_string": path_query.encode(), "state": {"tenant": "a"}}
    return json.loads(asyncio.run(handler(Request(scope))).body)


def test_usage_is_counted_by_hour_and_project(rng, database):
    book, now = Book(database), [1_000_000 * 3600.0]
    costs = Costs(database, clock=lambda: now[0])
    rest = Rest(builtin.SimpleNamespace(book=book, costs=costs, name="base"))
    paid, free = (
        book.open_session("a", {"project_id": p, "user_metadata": {"n": "1"}}) for p in ("p", None)
    )
    models = [book.add_model(session, 0, "a", {}).id for session in (paid, free)]
    counts = {}
    for hour in range(3):
        for kind in ("prefill", "decode", "train", "update", "prefill"):
            for tenant, policy in (("a", models[0]), ("a", models[1]), ("a", BASE), ("b", "x")):
                if kind != "train" or policy != BASE:
                    tokens = int(rng.integers(1, 99))
                    costs.charge(kind, 0.1, {Payer(tenant, policy): tokens})
                    key = hour, policy, kind
                    counts[key] = counts.get(key, 0) + tokens * (kind != "update" and tenant == "a")
        costs.flush()
        now[0] += 3600
    span = "starting_on={}Z&ending_before={}Z"
    begin = datetime.datetime.fromtimestamp(1_000_000 * 3600, datetime.UTC)
    ends = [f"{(begin + datetime.timedelta(hours=h)):%Y-%m-%dT%H:%M:%S}" for h in (0, 2)]
    found = tinker.types.BillingUsageResponse(**answer(rest.usage, span.format(*ends)))
    kinds = {"sampling_prefill": "prefill", "sampling_sample": "decode", "training": "train"}
    total = dict.fromkeys(kinds, 0)
    for event in found.data:
        total[event.event_info.type] += event.event_info.token_count
        assert begin <= event.bucket_start < event.bucket_end
        if event.event_info.type == "training":
            assert (event.session_id, event.project_id) in ((paid, "p"), (free, None))
            hour = round((event.bucket_start - begin).total_seconds() / 3600)
            count = counts[hour, f"{event.session_id}:train:0", "train"]
            assert event.event_info.token_count == count
    expected = {
        k: sum(n for key, n in counts.items() if key[0] < 2 and key[2] == v)
        for k, v in kinds.items()
    }
    assert total == expected
    assert found.sessions.keys() == {paid, free}
    for wrong in (
        (ends[0], ends[0]),
        (ends[1], ends[0]),
        (ends[0][:-2] + "01", ends[1]),
        ("2000-01-01T00:00:00", ends[0]),
    ):
        with pytest.raises(UserError, match="whole hours, at most 336"):
            answer(rest.usage, span.format(*wrong))

    for i, (model, digest) in enumerate(((0, "d"), (0, "d"), (0, "e"), (1, "d"))):
        row = Checkpoint(
            models[model], "weights", f"n{i}", "a", digest, 100, f"r{i}", {}, 0.0, None, False
        )
        book.add_checkpoint(row)
    stored = tinker.types.CurrentCheckpointStorageUsageResponse(**answer(rest.stored, ""))
    rows = {(one.project_id, one.checkpoint_count, one.size_bytes) for one in stored.data}
    assert rows == {("p", 3, 200), (None, 1, 100)}  # equal contents of a project count once
    assert [one["project_id"] for one in answer(rest.stored, "project_id=p")["data"]] == ["p"]


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


def clocked(call, into):
    """Returns a function that measures each call on its own."""

    @functools.wraps(call)
    def measured(*args, **kwargs):
        began = time.perf_counter()
        result = call(*args, **kwargs)
        into.append(time.perf_counter() - began)
        return result

    return measured


def seconds_of(costs, by="policy") -> float:
    return sum(cost.seconds for cost in costs.listed(by).values())


def work(rng, site) -> list[str]:
    """Trains two policies and samples them and the base; returns the policies' names."""
    trainers, asked = [site.trainer() for _ in range(2)], []
    for trainer in trainers:
        for _ in range(3):
            data = [datum_of(one) for one in random_data(rng, "cross_entropy", 24)]
            asked.append(trainer.forward_backward(data, "cross_entropy"))
            asked.append(trainer.optim_step(types.AdamParams(learning_rate=1e-3)))
    for one in asked:
        one.result()
    samplers = [trainer.save_weights_and_get_sampling_client().result() for trainer in trainers]
    samplers.append(site.client().create_sampling_client(base_model=site.server.name).result())
    prompt = types.ModelInput.from_ints(rng.integers(3, 97, 40).tolist())
    for one in [sampler.sample(prompt, 2, SAMPLING) for sampler in samplers]:
        one.result()
    return [trainer.model_id for trainer in trainers]


@pytest.fixture(scope="module")
def worked(site):
    return work(np.random.default_rng(), site)


@pytest.mark.long
def test_a_servers_costs_are_the_time_of_its_loop(rng, site, monkeypatch):
    assert site.server.compile().wait(), "compiling costs nothing"
    took, live, calls, costs = [], site.server.live, site.server.engine.calls, site.server.costs
    for thing, methods in (live, "step optim"), (calls, "prefill block_until_ready decode"):
        for name in methods.split():
            monkeypatch.setattr(thing, name, clocked(getattr(thing, name), took))
    before, measured, began = seconds_of(costs), costs.measured_s, time.perf_counter()
    names = work(rng, site)
    wall_s, found = time.perf_counter() - began, costs.listed("policy")
    assert {*names, BASE} <= set(found), "a sampled revision is charged to its policy"
    for name in names:
        assert all(getattr(found[name], f"{kind}_s") > 0 for kind in KINDS), found[name]
        assert found[name].decode_tokens == 32
    assert found[BASE].decode_tokens >= 32
    assert found[BASE].train_s == 0
    total = seconds_of(costs) - before
    assert total == pytest.approx(costs.measured_s - measured, rel=1e-6)
    assert seconds_of(costs, "tenant") - before == pytest.approx(total, rel=1e-6)
    assert total <= wall_s, "one thread computes: no second is counted twice"
    # Another clock: waits for the host's cores between two calls are in one of the two.
    assert total >= 0.5 * sum(took), "the devices' seconds are counted"


def test_operators_see_costs_in_pages_and_by_tenant(site, worked, monkeypatch):
    costs = site.server.costs

    def get(query):
        return httpx.get(f"{site.url}/admin/costs{query}")

    whole, page = get("?limit=1000").json(), get("?limit=1").json()
    listed = {name: cost.seconds for name, cost in costs.listed("policy").items()}
    assert {one["policy"]: one["seconds"] for one in whole["costs"]} == listed
    assert not whole["has_more"]
    assert page == {"costs": whole["costs"][:1], "has_more": True}
    assert get("?limit=1&offset=1").json()["costs"] == whole["costs"][1:2]
    default = {"tenant": "default"} | costs.listed("tenant")["default"].to_json()
    assert get("?by=tenant").json()["costs"] == [default]
    assert get("?tenant=nobody").json()["costs"] == []
    wrong = ["by=x", "limit=0", "limit=1001", "offset=-1", "by=tenant&tenant=a"]
    for query in (*wrong, "limit=9" + "9" * 400):
        assert get(f"?{query}").status_code == 400, query

    passed = dispatch.Fall("slot_lora", "cpu", "cpu", 'rows are "bfloat16"')
    elsewhere = dispatch.Fall("op", "x", "tpu", "no")
    monkeypatch.setattr(dispatch, "fallen", collections.Counter({passed: 3, elsewhere: 1}))
    gaps = collections.deque([0.1] * 98 + [0.2, 7.0])
    monkeypatch.setattr(site.server.durable, "gaps", gaps)
    found = series(site)
    seconds = found["mint_device_seconds_total"]
    assert sum(seconds.values()) == pytest.approx(costs.measured_s, rel=1e-6)
    assert {tenant for _, tenant in seconds} == {"default"}
    counts = site.server.engine.counts
    assert found["mint_engine_drawn_tokens_total"][()] == counts["drawn_tokens"] > 0
    assert found["mint_residency_joined_total"].keys() == {()}
    queue = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
    assert [found[name] for name in queue] == [{(): 0}] * 3, "nothing is sampled now"
    pages = site.server.engine.state()["pages"]["count"]
    assert found["vllm:cache_config_info"] == {(str(PAGE), str(pages)): 1}
    quantiles = {("0.5",): 0.1, ("0.95",): 0.1, ("0.99",): 0.2, ("1.0",): 7.0}
    assert found["mint_decode_gap_seconds"] == quantiles
    labels = "cpu", "slot_lora", 'rows are "bfloat16"'  # implementation, op, reason
    assert found["mint_kernels_passed_over_total"] == {labels: 3}


def series(site):
    """Returns the values of ``/metrics`` by name and labels."""
    found = collections.defaultdict(dict)
    for family in text_string_to_metric_families(httpx.get(site.url + "/metrics").text):
        for sample in family.samples:
            found[sample.name][tuple(v for _, v in sorted(sample.labels.items()))] = sample.value
    return found


def printed(site, *arguments):
    out = io.StringIO()
    status = top.main(
        [f"--url={site.url}", "--interval=0.05", *arguments], Console(file=out, width=200)
    )
    return status, out.getvalue()


def test_top_prints_one_table(site, worked, capsys):
    status, text = printed(site, "--once")
    assert status == 0
    for name in worked:
        [line] = [line for line in text.splitlines() if name in line]
        assert f"{site.server.costs.listed('policy')[name].seconds:.2f}" in line
    assert f"{sum(site.server.live.capacity.values())} slots" in text or "in slot" in text
    assert top.main(["--once", "--url=http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9/debug/state does not answer" in capsys.readouterr().err
    assert top.main(["--once", "--url=127.0.0.1"]) == 2
    assert top.main(["--once", f"--url={site.url}/no"]) == 1
    assert "answers 404" in capsys.readouterr().err
