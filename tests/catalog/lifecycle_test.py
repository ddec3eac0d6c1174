"""The catalog's methods one by one, on both databases."""

import dataclasses
import json

import numpy as np
import pytest
from blake3 import blake3

from mint_jax.catalog.packed import Schema
from mint_jax.catalog.records.exports import Export
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig
from tests.catalog.adapters import OTHER, SCHEMA, packed
from tests.catalog.conftest import same_bytes


def sha(data: bytes) -> str:
    return blake3(data).hexdigest()


def test_an_export_is_named_resolved_and_loaded(catalog, clock):
    made = catalog.create_policy("chat", SCHEMA, keep_last=3, by="ann", why="a try")
    assert (made.policy, made.tenant, made.base, made.schema) == (
        "chat",
        "default",
        SCHEMA.base,
        SCHEMA.to_json(),
    )
    assert (made.state, made.keep_last, made.parent, made.revisions, made.created_at) == (
        "active",
        3,
        None,
        0,
        clock.now,
    )
    clock.now += 5
    revision = catalog.export("chat", packed(1), 10, origin="sweep 3")
    assert (revision.policy, revision.number, revision.step, revision.origin) == (
        "chat",
        1,
        10,
        "sweep 3",
    )
    assert (revision.digest, revision.bytes, revision.created_at) == (
        sha(packed(1)),
        len(packed(1)),
        clock.now,
    )
    for name in (
        "chat",
        "chat@latest",
        "chat@1",
        "default/chat",
        revision.digest,
        revision.digest[:8],
    ):
        found = catalog.resolve(name)
        assert (found.policy, found.number, found.digest, found.schema) == (
            "chat",
            1,
            revision.digest,
            SCHEMA.to_json(),
        )
        assert same_bytes(catalog.load(name), packed(1))
    assert not catalog.load("chat").flags.writeable
    assert catalog.policy("chat") == dataclasses.replace(made, revisions=1, touched_at=clock.now)
    assert (
        catalog.revisions("chat")
        == [revision]
        == [catalog.revision("chat", which) for which in (1,)]
    )


def test_a_reopened_catalog_is_the_same(place, clock):
    first = place.open(clock=clock)
    revision = first.export("chat", packed(1), 1, create=True)
    first.promote("chat", 1)
    first.close()
    again = place.open()
    assert again.resolve("chat@serving").digest == revision.digest
    assert same_bytes(again.load("chat"), packed(1))
    assert [entry.action for entry in again.audit()] == ["create", "export", "promote"]


def test_numbers_count_in_each_policy(catalog):
    made = catalog.export_many([Export(f"p{i % 3}", packed(i), i) for i in range(9)], create=True)
    assert [(revision.policy, revision.number) for revision in made] == [
        (f"p{i % 3}", i // 3 + 1) for i in range(9)
    ]
    assert [r.number for r in catalog.revisions("p1")] == [1, 2, 3]
    assert [r.number for r in catalog.revisions("p1", after=1, limit=1)] == [2]
    assert catalog.resolve("p2").number == 3
    assert [entry.version for entry in catalog.history("p0", "latest")] == [1, 2, 3]


def test_export_many_is_one_pack_and_one_call(catalog):
    catalog.export_many([Export(f"p{i}", packed(i), 0) for i in range(40)], create=True)
    assert len(list(catalog.store.packs())) == 1
    assert catalog.stats()["payloads"] == 40
    texts = [f"p{i}@latest" for i in range(40)] + ["p7@1", sha(packed(3))]
    assert catalog.resolve_many(texts) == [catalog.resolve(text) for text in texts]
    assert catalog.export_many([]) == []
    assert catalog.resolve_many([]) == []


def test_export_many_is_all_or_nothing(catalog):
    catalog.create_policy("a", SCHEMA)
    catalog.create_policy("b", OTHER)
    with pytest.raises(
        UserError, match=r"policy 'b' has base 'cdcd.*the exported adapter has 'abab"
    ):
        catalog.export_many([Export("a", packed(1), 1), Export("b", packed(2), 1)])
    with pytest.raises(
        UserError,
        match="policy 'new' is not in the catalog: create it first, or export with create=True",
    ):
        catalog.export_many([Export("a", packed(1), 1), Export("new", packed(2), 1)])
    assert catalog.revisions("a") == catalog.revisions("b") == []
    assert catalog.stats()["payloads"] == 0
    assert [entry.action for entry in catalog.audit()] == ["create", "create"]


def test_a_policy_keeps_its_schema_but_for_the_dtype(catalog):
    catalog.create_policy("p", SCHEMA)
    half = dataclasses.replace(SCHEMA, dtype="bfloat16")
    assert catalog.resolve(catalog.export("p", packed(1, half), 1).digest).schema == half.to_json()
    wider = Schema(SCHEMA.base, AdapterConfig(2, 2.0, ("q",)))
    with pytest.raises(UserError, match="policy 'p' has rank 1, the exported adapter has 2"):
        catalog.export("p", packed(1, wider), 1)
    with pytest.raises(UserError, match="not a packed adapter"):
        catalog.export("p", b"something else", 1)
    with pytest.raises(UserError, match="step of an export of 'p' is -1"):
        catalog.export("p", packed(1), -1)


def test_equal_bytes_are_stored_once(catalog):
    first = catalog.export_many([Export("a", packed(1), 1), Export("b", packed(1), 1)], create=True)
    catalog.export("a", packed(1), 2)
    assert len({revision.digest for revision in first}) == 1
    assert [revision.number for revision in catalog.revisions("a")] == [1, 2]
    assert (catalog.stats()["payloads"], catalog.stats()["revisions"]) == (1, 3)
    assert len(list(catalog.store.packs())) == 1


def test_a_repeated_export_is_the_same_revision(catalog):
    first = catalog.export("a", packed(1), 1, create=True)
    assert catalog.export("a", packed(1), 1) == first
    assert len(catalog.history("a", "latest")) == 1
    catalog.export("a", packed(2), 2)
    # a job that was set back exports its steps again
    assert catalog.export("a", packed(1), 1) == first
    assert catalog.resolve("a").number == 1
    assert (
        catalog.export_many([Export("a", packed(2), 2), Export("a", packed(2), 2)])[1].number == 2
    )
    assert [entry.after for entry in catalog.history("a", "latest")] == [1, 2, 1, 2]
    assert catalog.stats()["revisions"] == 2


def test_promotion_and_rollback(catalog, clock):
    for step in (1, 2, 3):
        catalog.export("p", packed(step), step, create=True)
    moves = []
    for number in (1, 2, 3):
        clock.now += 1
        moves.append(catalog.promote("p", number, by="ann", why=f"score {number}"))
    assert [(move.number, move.version) for move in moves] == [(1, 1), (2, 2), (3, 3)]
    before = {pack.name for pack in catalog.store.packs()}
    assert catalog.rollback("p", by="bob", why="bad answers").number == 2
    assert catalog.rollback("p").number == 1  # twice goes further back
    with pytest.raises(UserError, match="alias p@serving has no revision before 1"):
        catalog.rollback("p")
    assert catalog.promote("p", "latest").number == 3  # undoes it
    assert catalog.rollback("p").number == 1
    assert catalog.promote("p", 2).number == 2
    assert catalog.rollback("p", to=1).number == 1
    with pytest.raises(UserError, match="did not point at revision 3 before"):
        catalog.rollback("p", to=3)
    history = catalog.history("p")
    assert [(entry.before, entry.after) for entry in history] == [
        (None, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 3), (3, 1), (1, 2), (2, 1)
    ]  # fmt: skip
    assert [entry.version for entry in history] == list(range(1, 10))
    assert (history[3].actor, history[3].why, history[3].action) == (
        "bob",
        "bad answers",
        "rollback",
    )
    assert {pack.name for pack in catalog.store.packs()} == before
    assert catalog.history("p", after=history[6].id) == history[7:]
    assert catalog.history("p", limit=2) == history[:2]
    with pytest.raises(UserError, match="alias p@candidate does not exist"):
        catalog.rollback("p", "candidate")


def test_a_long_history_of_moves(catalog, rng):
    """Eighty moves at random, against a stack."""
    for step in range(5):
        catalog.export("p", packed(step), step, create=True)
    catalog.promote("p", 1)
    stack, moves = [1], [(None, 1)]
    for _ in range(80):
        before = stack[-1]
        if rng.random() < 0.5:
            number = int(rng.integers(1, 6))
            catalog.promote("p", number)
            stack += [number] if number != before else []
        else:
            to = None if rng.random() < 0.6 else int(rng.integers(1, 6))
            under = stack[:-1]
            while to is not None and under and under[-1] != to:
                under.pop()
            if under:
                assert catalog.rollback("p", to=to).number == under[-1]
                stack = under
                moves.append((before, stack[-1]))
                continue
            with pytest.raises(UserError, match=r"no revision before|did not point at"):
                catalog.rollback("p", to=to)
        if stack[-1] != before:
            moves.append((before, stack[-1]))
        assert catalog.resolve("p@serving").number == stack[-1]
    assert [(entry.before, entry.after) for entry in catalog.history("p")] == moves


def test_promoting_what_is_there_changes_nothing(catalog):
    revision = catalog.export("p", packed(1), 1, create=True)
    first = catalog.promote("p", revision.digest, "candidate")
    length = len(catalog.audit())
    assert catalog.promote("p", "p@candidate", "candidate") == first
    assert len(catalog.audit()) == length
    assert catalog.aliases("p") == [first, catalog.aliases("p")[1]]
    assert [alias.name for alias in catalog.aliases("p")] == ["candidate", "latest"]


def test_the_log_is_in_order_though_the_clock_goes_back(catalog, clock):
    start = clock.now
    for step in range(6):
        clock.now = start - 100 * step
        catalog.export("p", packed(step), step, create=True)
        catalog.promote("p", step + 1)
    entries = catalog.audit("p")
    assert [entry.after for entry in entries if entry.action == "promote"] == [1, 2, 3, 4, 5, 6]
    assert {entry.at for entry in entries} == {start}
    assert {revision.created_at for revision in catalog.revisions("p")} == {start}


def test_a_branch_begins_with_the_bytes_of_its_parent(catalog):
    catalog.export("p", packed(1), 7, create=True)
    catalog.export("p", packed(2), 8)
    made = catalog.branch("lab/q", "p@1", keep_last=2, why="try another reward")
    assert (made.policy, made.parent, made.keep_last, made.schema) == (
        "lab/q",
        "p@1",
        2,
        SCHEMA.to_json(),
    )
    assert (catalog.resolve("lab/q").digest, catalog.resolve("lab/q").number) == (sha(packed(1)), 1)
    assert catalog.revision("lab/q", 1).origin == "branch of p@1"
    assert catalog.export("lab/q", packed(3), 8).number == 2
    assert catalog.resolve("p").number == 2
    assert catalog.stats()["payloads"] == 3
    with pytest.raises(UserError, match="'lab/q' exists already"):
        catalog.branch("lab/q", "p@1")
    with pytest.raises(UserError, match="policy 'p' has no revision 9: its newest is 2"):
        catalog.branch("r", "p@9")


@pytest.mark.parametrize("value", [-1, 2**63, 10**30, 1.5, None, "3", True])
def test_numbers_that_no_column_holds_are_refused(catalog, value):
    catalog.export("p", packed(1), 1, create=True)
    before = catalog.stats()
    for call in (
        lambda: catalog.export("p", packed(2), value),
        lambda: catalog.checkpoint("p", value, "there"),
        lambda: catalog.rollout("p", value, b"x", tokens=1, mean_reward=0.0),
        lambda: catalog.rollout("p", 1, b"x", tokens=value, mean_reward=0.0),
        lambda: catalog.promote("p", value if value != "3" else 3),
        lambda: catalog.keep_last("p", value if value is not None else 0),
    ):
        with pytest.raises(UserError):
            call()
    assert catalog.stats() == before


def test_bytes_of_a_rollout_may_become_a_revision(catalog):
    catalog.create_policy("p", SCHEMA)
    catalog.rollout("p", 1, packed(1), tokens=1, mean_reward=0.0)
    catalog.export("p", packed(1), 1)
    assert catalog.resolve("p").schema == SCHEMA.to_json()
    assert catalog.stats()["payloads"] == 1


def test_what_is_retired_does_not_resolve(catalog):
    for step in (1, 2):
        catalog.export("p", packed(step), step, create=True)
    with pytest.raises(
        UserError, match="revision p@2 is named by latest: promote another or roll back first"
    ):
        catalog.retire("p", 2)
    catalog.retire("p", 1, why="leaks")
    for name in ("p@1", sha(packed(1)), sha(packed(1))[:12]):
        with pytest.raises(UserError, match="revision p@1 is retired: restore it first"):
            catalog.resolve(name)
    with pytest.raises(UserError, match="is retired"):
        catalog.promote("p", 1)
    with pytest.raises(UserError, match="is retired"):
        catalog.rollback("p", "latest")
    with pytest.raises(UserError, match="is retired"):
        catalog.branch("q", "p@1")
    assert catalog.revision("p", 1).state == "retired"
    catalog.restore("p", 1)
    assert catalog.resolve("p@1").number == 1
    catalog.retire("p")
    catalog.retire("p")  # again is fine
    for call in (
        lambda: catalog.resolve("p"),
        lambda: catalog.resolve(sha(packed(1))),
        lambda: catalog.resolve_many(["p"]),
        lambda: catalog.export("p", packed(3), 3),
        lambda: catalog.promote("p", 1),
        lambda: catalog.open_session("p", "me"),
        lambda: catalog.checkpoint("p", 1, "there"),
    ):
        with pytest.raises(UserError, match="policy 'p' is retired: restore it first"):
            call()
    assert [record.policy for record in catalog.policies(state="retired")] == ["p"]
    catalog.restore("p")
    assert catalog.resolve("p").number == 2
    actions = [entry.action for entry in catalog.audit("p")]
    assert actions == [
        "create",
        "export",
        "export",
        "retire revision",
        "restore revision",
        "retire",
        "restore",
    ]


def test_bytes_of_a_retired_revision_resolve_where_another_has_them(catalog):
    catalog.export_many([Export(name, packed(1), 1) for name in ("a", "b", "c")], create=True)
    catalog.retire("a")
    catalog.export("b", packed(2), 2)
    catalog.retire("b", 1)
    assert catalog.resolve(sha(packed(1))).policy == "c"


def test_prefixes_of_digests(catalog):
    digests = [
        revision.digest
        for revision in catalog.export_many(
            [Export("p", packed(i), i) for i in range(300)], create=True
        )
    ]
    for digest in digests[::37]:
        for length in (8, 9, 31, 63, 64):
            assert catalog.resolve(digest[:length]).digest == digest
    execute_prefix_clash(catalog, digests[0])
    with pytest.raises(UserError, match="begins several digests: give more digits"):
        catalog.resolve(digests[0][:8])
    with pytest.raises(UserError, match="begins 2 digests of policy 'p': give more digits"):
        catalog.revision("p", digests[0][:10])
    assert catalog.resolve(digests[0]).digest == digests[0]
    with pytest.raises(UserError, match="no digest begins so"):
        catalog.resolve("0" * 64)
    with pytest.raises(UserError, match="is not in the catalog"):
        catalog.resolve(digests[0][:7])  # too short: a policy's name


def execute_prefix_clash(catalog, digest: str) -> None:
    """Adds a payload and a revision whose digest differs from ``digest`` in its last hex digits."""
    from mint_jax.catalog.records.tables import payloads, revisions

    other = bytes.fromhex(digest)[:-1] + bytes([bytes.fromhex(digest)[-1] ^ 1])
    with catalog.database.engine.begin() as c:
        row = (
            c.execute(payloads.select().where(payloads.c.digest == bytes.fromhex(digest)))
            .one()
            ._mapping
        )
        c.execute(payloads.insert(), {**row, "digest": other})
        row = dict(
            c.execute(revisions.select().where(revisions.c.digest == bytes.fromhex(digest)))
            .one()
            ._mapping
        )
        del row["id"]
        c.execute(revisions.insert(), {**row, "number": 1000, "digest": other})


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


def test_policies_are_listed_in_pages(catalog):
    wanted = sorted([f"p{i:02}" for i in range(25)] + ["B", "a b", "Ä", "ä", "_"])
    catalog.export_many([Export(name, packed(0), 0) for name in wanted], create=True)
    catalog.create_policy("zoo/p", SCHEMA)
    found, after = [], None
    while some := catalog.policies(after=after, limit=7):
        assert len(some) <= 7
        found += [record.policy for record in some]
        after = some[-1].policy
    assert found == [*wanted, "zoo/p"]


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


def test_a_name_is_taken_once(catalog):
    catalog.create_policy("p", SCHEMA)
    with pytest.raises(UserError, match="policy 'p' exists already"):
        catalog.create_policy("p", SCHEMA)
    with pytest.raises(UserError, match=r"keep_last .* is 0; expected an integer from 1"):
        catalog.create_policy("q", SCHEMA, keep_last=0)
    assert len(catalog.policies()) == 1


def test_a_revision_of_another_policy_cannot_be_promoted(catalog):
    catalog.export_many([Export("p", packed(1), 1), Export("q", packed(2), 1)], create=True)
    with pytest.raises(
        UserError, match="revision 'q@1' is not of policy 'p': branch from it instead"
    ):
        catalog.promote("p", "q@1")
    with pytest.raises(UserError, match="policy 'p' has no revision"):
        catalog.promote("p", sha(packed(2)))


def test_evaluations_name_what_produced_them(catalog, clock):
    catalog.export("p", packed(1), 1, create=True)
    score = {
        "renderer": "qwen3",
        "scorer": "exact/2",
        "dataset": "ef" * 32,
        "seed": 7,
        "metrics": {"n": 100, "by level": [0.5, 0.25]},
    }
    made = catalog.record_evaluation("p@1", **score, isolated=0.5, shared=0.5)
    assert (made.policy, made.number, made.digest, made.base) == (
        "p",
        1,
        sha(packed(1)),
        SCHEMA.base,
    )
    assert {field: getattr(made, field) for field in score} == score
    assert (made.isolated, made.shared, made.created_at) == (0.5, 0.5, clock.now)
    close = catalog.record_evaluation(
        sha(packed(1)), **score, isolated=0.5, shared=0.51, tolerance=0.02
    )
    assert catalog.evaluations("p@latest") == catalog.evaluations("p") == [made, close]
    for isolated, shared in ((0.5, 0.51), (0.5, float("nan")), (float("inf"), float("inf"))):
        with pytest.raises(UserError, match=r"loaded alone and .* in a shared batch"):
            catalog.record_evaluation("p", **score, isolated=isolated, shared=shared)
    with pytest.raises(UserError, match="metrics of p@1 are not JSON"):
        catalog.record_evaluation(
            "p", **{**score, "metrics": {"loss": float("nan")}}, isolated=1, shared=1
        )
    assert len(catalog.evaluations("p")) == 2
    assert [
        entry.details["scorer"] for entry in catalog.audit("p") if entry.action == "evaluate"
    ] == ["exact/2"] * 2


def test_training_leaves_checkpoints_and_rollouts(catalog):
    catalog.create_policy("p", SCHEMA)
    first = catalog.checkpoint("p", 100, "gs://bucket/run/step_100")
    second = catalog.checkpoint("p", 200, "gs://bucket/run/step_200")
    assert catalog.checkpoints("p") == [second, first]
    assert catalog.checkpoints("p", limit=1) == [second]
    third = catalog.checkpoint("p", 300, "gs://bucket/run/step_300", keep=2)
    assert catalog.checkpoints("p") == [third, second], "the record goes with the files"
    assert catalog.audit("p")[-1].details["forgotten"] == 1
    with pytest.raises(UserError, match="keep is 0; expected"):
        catalog.checkpoint("p", 400, "gs://bucket/run/step_400", keep=0)
    data = json.dumps({"tokens": [1, 2, 3]}).encode()
    record = catalog.rollout("p", 5, data, tokens=3, mean_reward=0.5)
    assert (record.digest, record.tokens, record.mean_reward) == (sha(data), 3, 0.5)
    assert catalog.rollouts("p") == [record]
    assert same_bytes(catalog.read_rollout(record), data)
    with pytest.raises(UserError, match="mean_reward"):
        catalog.rollout("p", 5, b"x", tokens=1, mean_reward=float("nan"))
    with pytest.raises(UserError, match="not in the catalog"):
        catalog.resolve(record.digest)  # no adapter
    assert catalog.drop_rollouts("p", 5) == 0
    assert catalog.drop_rollouts("p", 6) == 1
    assert catalog.rollouts("p") == []
    assert [entry.action for entry in catalog.audit("p")] == [
        "create",
        *["checkpoint"] * 3,
        "rollout",
        "drop rollouts",
    ]


def test_the_log_tells_every_change_and_its_author(catalog):
    catalog.create_policy("p", SCHEMA, by="ann", why="first")
    catalog.export("p", packed(1), 1, by="job 7")
    catalog.pin("p", 1, by="bob")
    catalog.pin("p", 1)
    catalog.unpin("p", 1)
    catalog.keep_last("p", 4)
    told = [(entry.actor, entry.action, entry.why) for entry in catalog.audit()]
    assert told == [
        ("ann", "create", "first"), ("job 7", "export", ""), ("bob", "pin", ""), ("tester", "unpin", ""), ("tester", "keep_last", "")  # noqa: E501
    ]  # fmt: skip
    assert catalog.audit("p") == catalog.audit()
    assert catalog.audit(after=catalog.audit()[2].id, limit=1) == [catalog.audit()[3]]
    assert catalog.policy("p").keep_last == 4
    for text in ("a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(UserError, match="must be text"):
            catalog.keep_last("p", 5, why=text)
    with pytest.raises(UserError, match=r"by .* must be text"):
        catalog.keep_last("p", 5, by="\0")
    assert catalog.policy("p").keep_last == 4


def test_large_objects_are_mapped_and_verified(catalog):
    data = packed(1, width=1 << 19)
    catalog.export("p", data, 1, create=True)
    np.testing.assert_array_equal(catalog.load("p"), np.frombuffer(data, np.uint8))
