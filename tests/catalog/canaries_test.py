"""Canaries in the catalog, on both databases: opened, decided by their evidence, ended, refused."""

import dataclasses

import pytest

from mint_jax.catalog.evidence import ArmReward, CanaryEvidence
from mint_jax.errors import UserError
from tests.catalog.adapters import packed

GUARD = "reward>=parent-0.1"


@pytest.fixture
def chat(catalog):
    """A catalog whose policy ``chat`` has three revisions, the first one ``serving``."""
    for i in range(3):
        catalog.export("chat", packed(i), i, create=True)
    catalog.promote("chat", 1)
    return catalog


def rewards(count: int, candidate: float, parent: float, start: int = 1):
    """Numbered rewards of turns: the candidate answers each fifth request."""
    for place in range(start, start + count):
        yield (
            place,
            ArmReward(True, 0.2, candidate) if place % 5 == 0 else ArmReward(False, 0.8, parent),
        )


def test_a_bad_candidate_is_rolled_back_and_the_alias_stays(chat, clock):
    opened = chat.open_canary("chat", 2, share=0.2, guard=GUARD, why="try it")
    assert (opened.state, opened.parent, opened.candidate, opened.margin) == ("open", 1, 2, 0.1)
    assert opened.digest == chat.resolve("chat@2").digest
    assert chat.resolve("chat@serving").canary == opened.id
    assert [one.canary for one in chat.resolve_many(["chat@serving", "chat", "chat@1"])] == [
        opened.id, None, None
    ]  # fmt: skip
    clock.now += 9
    given, expected = list(rewards(200, 0.0, 1.0)), CanaryEvidence()
    for i, (_, one) in enumerate(given):
        found = chat.observe(opened.id, "a", given[i : i + 1])
        expected = expected.after(one, 0.1)
        assert found.evidence == expected
        if found.state != "open":
            break
    assert (found.state, found.updated_at) == ("rolled back", clock.now)
    assert found.evidence.e_worse >= 20 > chat.observe(opened.id, "a", []).evidence.e_fit
    assert chat.resolve("chat@serving").number == 1
    assert chat.resolve("chat@serving").canary is None
    entry = chat.audit("chat")[-1]
    assert (entry.action, entry.before, entry.details["canary"]) == (
        "roll back canary",
        2,
        opened.id,
    )
    assert f"({found.evidence.answers[1]} answers)" in entry.why
    assert chat.observe(opened.id, "a", given[-3:]) == found, "what comes later changes nothing"
    assert chat.canaries("chat") == [found] == chat.canaries("chat", "serving")
    assert chat.open_canary("chat", 3, share=0.5, guard="reward >= parent").margin == 0


def test_a_better_candidate_is_promoted_with_the_numbers_in_the_log(chat):
    opened = chat.open_canary("chat", 2, share=0.2, guard=GUARD)
    found = chat.observe(opened.id, "a", list(rewards(1000, 1.0, 0.3)), by="judge")
    assert found.state == "promoted"
    alias = chat.aliases("chat")[1]
    assert (alias.name, alias.number, alias.version) == ("serving", 2, 2)
    closed, moved = chat.audit("chat")[-2:]
    assert (closed.action, moved.action, moved.actor) == ("promote canary", "promote", "judge")
    assert (moved.before, moved.after, moved.details["canary"]) == (1, 2, opened.id)
    assert closed.why == moved.why
    assert moved.why.startswith(f"canary {opened.id}: mean reward 1 of revision 2")
    assert chat.rollback("chat").number == 1, "as after any promotion"


def test_rewards_count_once_whoever_gives_them_again(chat):
    opened = chat.open_canary("chat", 2, share=0.2, guard=GUARD)
    given = list(rewards(12, 0.5, 0.5))
    chat.observe(opened.id, "a", given[:8])
    chat.observe(opened.id, "a", given[4:])  # a killed server does not know what it has given
    found = chat.observe(opened.id, "b", given[:1])  # another one numbers its own
    expected = CanaryEvidence()
    for _, one in [*given, *given[:1]]:
        expected = expected.after(one, 0.1)
    assert found.evidence == expected
    with pytest.raises(UserError, match=r"reward is 1\.5"):
        chat.observe(opened.id, "a", [(99, ArmReward(True, 0.2, 1.5))])
    assert chat.canary(opened.id) == found


def test_a_moved_alias_supersedes_its_canary_and_candidates_are_kept(chat):
    opened = chat.open_canary("chat", 2, share=0.2, guard=GUARD)
    with pytest.raises(UserError, match="candidate of a canary on 'serving': end the canary first"):
        chat.retire("chat", 2)
    chat.export("chat", packed(8), 8)
    chat.keep_last("chat", 1)
    assert chat.gc(grace_s=0).revisions == ["chat@3"]
    assert chat.resolve("chat@2").digest == opened.digest
    chat.promote("chat", "latest")
    assert chat.canary(opened.id).state == "superseded"
    assert chat.resolve("chat@serving").canary is None
    again = chat.open_canary("chat", 2, share=0.2, guard=GUARD)
    ended = chat.end_canary("chat", why="enough")
    assert ended == dataclasses.replace(again, state="ended")
    assert (chat.audit("chat")[-1].action, chat.audit("chat")[-1].why) == ("end canary", "enough")
    with pytest.raises(UserError, match="alias chat@serving has no open canary"):
        chat.end_canary("chat")
    chat.retire("chat")
    chat.delete("chat")
    with pytest.raises(UserError, match=f"there is no canary {opened.id}"):
        chat.observe(opened.id, "a", list(rewards(1, 1.0, 1.0)))


WRONG = {
    "share of a canary is 0;": {"share": 0},
    "share of a canary is 0.51; expected a number above 0, to 0.5": {"share": 0.51},
    "share of a canary is nan": {"share": float("nan")},
    "alpha of a canary is 0;": {"alpha": 0},
    "has the bytes that chat@serving points at": {"revision": 1},
    "latest moves with every export": {"alias": "latest"},
    "alias chat@other does not exist: promote": {"alias": "other"},
    "policy 'chat' has no revision 9": {"revision": 9},
}
GUARDS = ("", "reward", "reward>=parent-1", "reward>parent", "loss>=parent", "reward>=parent-x")


def test_wrong_canaries_are_refused(chat):
    good = {"revision": 2, "share": 0.1, "guard": GUARD}
    for words, change in WRONG.items():
        with pytest.raises(UserError, match=words):
            chat.open_canary("chat", **good | change)
    for guard in GUARDS:
        with pytest.raises(UserError, match=r"guard is .*; expected reward>=parent-MARGIN"):
            chat.open_canary("chat", **good | {"guard": guard})
    assert chat.canaries("chat") == []
    first = chat.open_canary("chat", **good)
    with pytest.raises(UserError, match=f"has a canary, {first.id}: wait for its decision, or end"):
        chat.open_canary("chat", **good | {"revision": 3})
