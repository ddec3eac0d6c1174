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


def test_a_deleted_policy_leaves_its_log_and_scores_and_frees_its_name(filled):
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
    [deleted] = filled.policies(state="deleted")
    entry = filled.audit()[-1]
    assert (entry.policy, entry.actor, entry.why) == (deleted.policy, "ann", "superseded")
    assert (entry.details["policy"], entry.details["revisions"]) == ("p", [1, 2, 3, 4])
    [kept] = filled.evaluations(score.digest)
    assert (kept.policy, kept.number, kept.digest) == (None, None, score.digest)
    assert filled.gc(grace_s=0.0).payloads == 2, "the rollout and revision 4; q has the others"
    assert same_bytes(filled.load("q@1"), packed(0))
    assert filled.export("p", packed(0), 0, create=True).number == 1
    assert (filled.tags("p"), filled.checkpoints("p"), filled.rollouts("p")) == ({}, [], [])
    assert list(filled.verify()) == []


def test_a_policy_in_use_is_not_deleted(filled, clock):
    session = filled.open_session("p", "a job", 60.0)
    lease = filled.lease("p@2", "engine", 100.0)  # of bytes that q has too
    filled.branch("child", "p@3")
    for name in ("p", "q"):
        filled.retire(name)
    with pytest.raises(UserError, match="revision q@2 is leased by 'engine'"):
        filled.delete("q")
    filled.release(lease)
    with pytest.raises(UserError, match="policy 'p' is being trained by 'a job'"):
        filled.delete("p")
    clock.now += 61.0  # the job was killed
    with pytest.raises(UserError, match="revision p@3 is the parent of 'child'"):
        filled.delete("p")
    filled.retire("child")
    for name in ("child", "q", "p"):
        filled.delete(name)
    with pytest.raises(UserError, match="policy 'p' is not in the catalog"):
        filled.export("p", packed(9), 9, session=session)
    assert filled.gc(grace_s=0.0).payloads == 3
    assert list(filled.verify()) == []
