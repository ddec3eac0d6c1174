"""Names, exports, aliases, evaluations and records of training, on both databases."""

import dataclasses

import pytest
from blake3 import blake3

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from tests.catalog.adapters import SCHEMA, packed
from tests.catalog.conftest import same_bytes


def sha(data: bytes) -> str:
    return blake3(data).hexdigest()


def test_an_export_is_named_resolved_and_loaded(place, clock):
    catalog = place.open(clock=clock, actor="tester")
    made = catalog.create_policy("chat", SCHEMA, keep_last=3, by="ann", why="a try")
    assert made == catalog.policy("chat")
    assert (made.policy, made.tenant, made.base, made.schema, made.state, made.keep_last) == (
        "chat", "default", SCHEMA.base, SCHEMA.to_json(), "active", 3
    )  # fmt: skip
    clock.now += 5
    revision = catalog.export("chat", packed(1), 10, origin="sweep 3")
    digest = sha(packed(1))
    assert revision == dataclasses.replace(
        revision, policy="chat", number=1, step=10, origin="sweep 3", digest=digest,
        bytes=len(packed(1)), created_at=clock.now, state="live", pinned=False,
    )  # fmt: skip
    again = place.open()  # another handle finds the same
    assert again.policy("chat") == dataclasses.replace(made, revisions=1, touched_at=clock.now)
    assert again.revisions("chat") == [revision] == [again.revision("chat", 1)]
    names = ["chat", "chat@latest", "chat@1", "default/chat", digest, digest[:8]]
    for name, found in zip(names, again.resolve_many(names)):
        assert found == again.resolve(name)
        assert (found.policy, found.number, found.digest, found.schema) == (
            "chat", 1, digest, SCHEMA.to_json()
        )  # fmt: skip
        assert same_bytes(again.load(name), packed(1))
    assert not again.load("chat").flags.writeable
    entries = again.audit()
    assert [(one.actor, one.action, one.why) for one in entries] == [
        ("ann", "create", "a try"),
        ("tester", "export", ""),
    ]
    assert entries == again.audit("chat")
    assert again.audit(after=entries[0].id, limit=1) == entries[1:]
    for note in ("a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(UserError, match="must be text"):
            again.keep_last("chat", 5, why=note)


def test_a_policy_keeps_its_schema_but_for_the_dtype(catalog):
    catalog.create_policy("p", SCHEMA)
    half = dataclasses.replace(SCHEMA, dtype="bfloat16")
    assert catalog.resolve(catalog.export("p", packed(1, half), 1).digest).schema == half.to_json()
    wider = Schema(SCHEMA.base, AdapterConfig(2, 2.0, ("q",)))
    with pytest.raises(UserError, match="policy 'new' is not in the catalog: create it first"):
        catalog.export_many([Export("p", packed(9), 1), Export("new", packed(2), 1)])
    assert catalog.stats()["payloads"] == 1, "all or nothing"
    with pytest.raises(UserError, match="policy 'p' has rank 1, the exported adapter has 2"):
        catalog.export("p", packed(1, wider), 1)
    with pytest.raises(UserError, match="not a packed adapter"):
        catalog.export("p", b"something else", 1)
    with pytest.raises(UserError, match="step of an export of 'p' is -1"):
        catalog.export("p", packed(1), -1)


def test_evaluations_name_what_produced_them(catalog, clock):
    catalog.export("p", packed(1), 1, create=True)
    fields = {
        "renderer": "qwen3",
        "scorer": "exact/2",
        "dataset": "ef" * 32,
        "seed": 7,
        "metrics": {"n": 100, "by level": [0.5, 0.25]},
    }
    made = catalog.record_evaluation("p@1", **fields, isolated=0.5, shared=0.5)
    expected = fields | {"policy": "p", "number": 1, "digest": sha(packed(1)), "base": SCHEMA.base}
    assert dataclasses.asdict(made) == expected | {
        "id": made.id, "isolated": 0.5, "shared": 0.5, "created_at": clock.now
    }  # fmt: skip
    again = catalog.record_evaluation(made.digest, **fields, isolated=0.5, shared=0.5)
    assert catalog.evaluations("p@latest") == catalog.evaluations("p") == [made, again]
    for isolated, shared in ((0.5, 0.51), (0.5, float("nan")), (float("inf"), float("inf"))):
        with pytest.raises(UserError, match=r"loaded alone and .* in a shared batch"):
            catalog.record_evaluation("p", **fields, isolated=isolated, shared=shared)
    fields["metrics"] = {"loss": float("nan")}
    with pytest.raises(UserError, match="metrics of p@1 are not JSON"):
        catalog.record_evaluation("p", **fields, isolated=1, shared=1)
    assert catalog.audit("p")[-1].details["scorer"] == "exact/2"


def test_training_leaves_checkpoints_and_rollouts(catalog):
    catalog.create_policy("p", SCHEMA)
    made = [catalog.checkpoint("p", step, f"gs://bucket/{step}", keep=2) for step in (1, 2, 3)]
    assert catalog.checkpoints("p") == made[:0:-1], "older records go with their files"
    assert catalog.checkpoints("p", limit=1) == made[2:]
    assert catalog.audit("p")[-1].details["forgotten"] == 1
    with pytest.raises(UserError, match="keep is 0; expected"):
        catalog.checkpoint("p", 400, "gs://bucket/run/step_400", keep=0)
    record = catalog.rollout("p", 5, b"tokens", tokens=3, mean_reward=0.5)
    assert (record.digest, record.tokens, record.mean_reward) == (sha(b"tokens"), 3, 0.5)
    assert catalog.rollouts("p") == [record]
    assert same_bytes(catalog.load_payload(record.digest), b"tokens")
    with pytest.raises(UserError, match="mean_reward"):
        catalog.rollout("p", 5, b"x", tokens=1, mean_reward=float("nan"))
    with pytest.raises(UserError, match="not in the catalog"):
        catalog.resolve(record.digest)  # no adapter
    assert (catalog.drop_rollouts("p", 5), catalog.drop_rollouts("p", 6)) == (0, 1)
    assert catalog.rollouts("p") == []


def test_tenants_do_not_see_each_other(catalog):
    catalog.export_many(
        [Export("red/p", packed(1), 1), Export("blue/p", packed(2), 1), Export("p", packed(3), 1)],
        create=True,
    )
    digest = sha(packed(1))
    assert catalog.resolve("p", tenant="red").digest == digest == catalog.resolve("red/p").digest
    assert catalog.resolve("p").digest == sha(packed(3))
    assert catalog.resolve(digest, tenant="red").policy == "red/p"
    assert catalog.resolve(digest[:12]).policy == "red/p"
    for name in (digest, digest[:12]):
        with pytest.raises(UserError, match="not in the catalog"):
            catalog.resolve(name, tenant="blue")
    with pytest.raises(UserError, match="belongs to another tenant than 'blue'"):
        catalog.resolve("red/p", tenant="blue")
    assert [record.policy for record in catalog.policies("red")] == ["red/p"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "policy 'none' is not in the catalog: list the policies, or create it"),
        ("empty", "policy 'empty' has no revision yet: export one first"),
        ("p@5", "policy 'p' has no revision 5: its newest is 1"),
        ("p@serving", "policy 'p' has no alias 'serving'"),
        ("p@0", "policy 'p' has no revision 0|removed"),
    ],
)
def test_an_unknown_name_says_what_is_unknown(catalog, name, reason):
    catalog.create_policy("empty", SCHEMA)
    catalog.export("p", packed(1), 1, create=True)
    with pytest.raises(UserError, match=reason):
        catalog.resolve(name)
    with pytest.raises(UserError, match=reason):
        catalog.resolve_many(["p", name])
    with pytest.raises(UserError, match=reason):
        catalog.load(name)


def test_names_that_would_read_as_digests_or_numbers_are_refused(catalog):
    for name in ("deadbeef", "20240101", sha(packed(1))):
        with pytest.raises(UserError, match="would read as a revision's digest"):
            catalog.create_policy(name, SCHEMA)
    catalog.export("p", packed(1), 1, create=True)
    for alias in ("12", "٣"):
        with pytest.raises(UserError, match="would read as a revision's number"):
            catalog.promote("p", 1, alias)
