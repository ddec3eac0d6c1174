"""Tags, and the removal of a policy."""

import pytest

from mint_jax.errors import UserError
from tests.catalog.adapters import packed
from tests.catalog.conftest import same_bytes


@pytest.fixture
def filled(catalog):
    """Policies ``p`` and ``q`` of three revisions each; ``serving`` names the second."""
    for policy in ("p", "q"):
        for step in range(3):
            catalog.export(policy, packed(step), step, create=True)
        catalog.promote(policy, 2)
    return catalog


def test_tags_are_set_changed_removed_and_found(filled):
    assert filled.tag("p", {"team": "chat", "language": "español"}) == {
        "language": "español",
        "team": "chat",
    }
    assert filled.tag("p", {"team": "search"}, by="ann", why="moved") == {
        "language": "español",
        "team": "search",
    }
    assert filled.tag("q", {"team": "search"}) == {"team": "search"}
    assert [one.policy for one in filled.policies(tagged={"team": "search"})] == ["p", "q"]
    assert [
        one.policy for one in filled.policies(tagged={"team": "search", "language": "español"})
    ] == ["p"]
    assert filled.policies(tagged={"team": "chat"}) == []
    assert filled.tags_of(filled.policies()) == {
        "p": {"language": "español", "team": "search"},
        "q": {"team": "search"},
    }
    assert filled.tag("p", {"team": None, "absent": None}) == {"language": "español"}
    entry = filled.audit("p")[-2]
    assert (entry.action, entry.actor, entry.why, entry.details) == (
        "tag",
        "ann",
        "moved",
        {"tags": {"team": "search"}},
    )
    length = len(filled.audit())
    assert filled.tag("p", {"language": "español"}) == {"language": "español"}, "nothing changed"
    assert len(filled.audit()) == length
    assert list(filled.verify()) == []


def test_a_revision_has_tags_of_its_own(filled):
    filled.tag("p", {"of": "policy"})
    filled.tag("p@2", {"of": "second"})
    filled.tag("p@latest", {"of": "third"})
    assert [filled.tags(name) for name in ("p", "p@1", "p@2", "p@serving", "p@3")] == [
        {"of": "policy"},
        {},
        *[{"of": "second"}] * 2,
        {"of": "third"},
    ]
    assert filled.policies(tagged={"of": "second"}) == []


def test_a_removed_revision_takes_its_tags_along(filled):
    filled.tag("p@1", {"of": "first"})
    filled.keep_last("p", 1)
    assert filled.gc(grace_s=0.0).revisions == ["p@1"]
    assert filled.stats()["tags"] == 0
    assert list(filled.verify()) == []


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("p", {"": "x"}, "tag '' has 0 characters"),
        ("p", {"a/b": "x"}, "contains '/'"),
        ("p", {"a": ""}, "the value of tag 'a' is empty"),
        ("p", {"a": "x" * 401}, "must be text of at most 400 characters"),
        ("p", {"a": "\0"}, "without NUL"),
        ("absent", {"a": "x"}, "'absent' is not in the catalog"),
        ("p@9", {"a": "x"}, "has no revision 9"),
        ("p@", {"a": "x"}, "alias ''"),
    ],
)
def test_what_cannot_be_tagged(filled, name, changes, told):
    with pytest.raises(UserError, match=told):
        filled.tag(name, changes)
    assert filled.stats()["tags"] == 0


def test_a_policy_in_training_is_not_deleted(filled, clock):
    session = filled.open_session("p", "a job", 60.0)
    filled.retire("p")
    with pytest.raises(UserError, match="policy 'p' is being trained by 'a job'"):
        filled.delete("p")
    clock.now += 61.0  # the job was killed
    filled.delete("p")
    with pytest.raises(UserError, match="policy 'p' is not in the catalog"):
        filled.export("p", packed(9), 9, session=session)
    assert list(filled.verify()) == []


def test_a_policy_is_deleted_and_its_name_begins_anew(filled):
    filled.tag("p", {"team": "x"})
    filled.checkpoint("p", 1, "/somewhere")
    filled.rollout("p", 1, packed(77), tokens=1, mean_reward=0.0)
    filled.export("p", packed(88), 5)
    score = filled.record_evaluation(
        "p@4", renderer="r", scorer="s", dataset="d", seed=0, metrics={}, isolated=1.0, shared=1.0
    )
    with pytest.raises(UserError, match="policy 'p' is active: retire it first"):
        filled.delete("p")
    filled.retire("p")
    filled.delete("p", by="ann", why="superseded")
    with pytest.raises(UserError, match="policy 'p' is not in the catalog"):
        filled.delete("p")
    assert [one.policy for one in filled.policies()] == ["q"]
    [stone] = filled.policies(state="deleted")
    assert stone.name.startswith("p@deleted-")
    entry = filled.audit()[-1]
    assert (entry.action, entry.policy, entry.actor, entry.why) == (
        "delete",
        stone.policy,
        "ann",
        "superseded",
    )
    assert entry.details["policy"] == "p"
    assert entry.details["revisions"] == [1, 2, 3, 4]
    assert [(one.policy, one.number, one.digest) for one in filled.evaluations(score.digest)] == [
        (None, None, score.digest)
    ]
    assert filled.gc(grace_s=0.0).payloads == 2, (
        "the rollout and revision 4; q has the bytes of the others"
    )
    assert same_bytes(filled.load("q@1"), packed(0))
    assert filled.export("p", packed(0), 0, create=True).number == 1
    assert filled.tags("p") == {}
    assert filled.checkpoints("p") == filled.rollouts("p") == []
    assert filled.stats()["policies"] == 2
    assert list(filled.verify()) == []


def test_what_others_need_is_not_deleted(filled, clock):
    filled.retire("q")
    lease = filled.lease("p@2", "engine", 100.0)  # of bytes that q has too
    with pytest.raises(UserError, match="revision q@2 is leased by 'engine'"):
        filled.delete("q")
    filled.release(lease)
    filled.lease("p@2", "engine", 100.0)
    clock.now += 200.0  # expired
    filled.branch("child", "p@3")
    filled.retire("p")
    with pytest.raises(UserError, match="revision p@3 is the parent of 'child'"):
        filled.delete("p")
    filled.delete("q")
    filled.retire("child")
    filled.delete("child")
    filled.delete("p")
    assert filled.policies() == []
    assert filled.gc(grace_s=0.0).payloads == 3
    assert list(filled.verify()) == []
