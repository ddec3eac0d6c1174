"""A policy's run is its own, whichever other policies train."""

import dataclasses
import json
import sys
import types

import numpy as np
import pytest

from mint_jax.data.order import epoch_indices, further_indices
from mint_jax.envs.env import Example, ListConversation, ListEnvironment, StepResult
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.options import GrpoSampling
from mint_jax.harness.recorder import Snapshot
from mint_jax.recipes import dialogues, in_flight, parts
from mint_jax.recipes.grpo import rollout_groups
from mint_jax.recipes.rollouts import Rollout, missing_prompts, rollout_metrics, trained
from mint_jax.rollout.request import Completion
from mint_jax.train.advantages import group_advantages
from tests.configs import run_config, tiny

pytestmark = pytest.mark.bits

# lengths of each policy's prompts, in the order of the steps
LENGTHS = {"b": [28, 22], "a": [24, 30], "z": [26, 24]}


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch):
    """Prompts of these lengths, as an environment; a prompt is its length, spelled out."""

    def encode(base, prompt, variables):
        return np.random.default_rng(int(prompt)).integers(3, 200, int(prompt)).tolist()

    def make(policy, converses):
        wanted = LENGTHS[policy]
        order = epoch_indices(len(wanted), len(wanted), start.policy_seed(0, policy), 0)
        placed = dict(zip(order, wanted))
        both = [Example(str(placed[i]), "") for i in range(len(wanted))], [Example("9", "")]
        if policy != "b" or not converses:
            return ListEnvironment(*both, lambda text, example: float(len(text) % 7))
        answer = lambda texts, _: StepResult(" or", len(texts[-1]) % 7, len(texts) == 3)  # noqa: E731
        return ListConversation(*both, answer)

    monkeypatch.setattr(start, "encode", encode)
    module = types.ModuleType("own_rewards")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_rewards", module)


def revisions(folder, max_tokens: dict[str, int], stale=0, converses=False, parts=False):
    """Returns the final revision of each policy after two steps one by one."""
    config = tiny("grpo", tensorboard=False, export_every=1, schedule="sequential", steps=2)
    usual = config.policies.ppo.to_dict()
    with config.unlocked():
        config.max_staleness, config.partial_rollouts = stale, parts
        config.policies = {
            name: usual
            | {"env": {"name": "own_rewards:make", "policy": name, "converses": converses}}
            | {"sampling": {"prompts": 1, "group_size": 2, "max_tokens": most, "max_turns": 3}}
            for name, most in max_tokens.items()
        }
    return {p["name"]: p["revision"] for p in run_config(config, folder)["policies"]}


def sampled(rng, lengths_QG, options):
    """A rollout of completions of these lengths, and random rewards; of the last prompt equal."""
    sampling = GrpoSampling(group_size=len(lengths_QG[0]), max_tokens=10, **options)

    def completion(n):
        end = "length" if n == sampling.max_tokens else "stop"
        return Completion([5] * n, [-1.0] * n, [-1.0] * n, end, None)

    made = [[completion(n) for n in row] for row in lengths_QG]
    rewards = rng.normal(size=np.shape(lengths_QG))
    rewards[-1] = 0.5
    return sampling, Rollout([], [[1, 2]] * len(made), made, []), rewards


def test_completions_that_were_cut_off_train_nothing_and_long_ones_earn_less(rng):
    """Oracle: DAPO's equation 13, and advantages as the rewards' own."""
    lengths = np.array([[4, 6, 10], [7, 10, 8]])
    options = {"mask_truncated": True, "overlong_tokens": 4, "normalisation": "token"}
    sampling, rollout, rewards = sampled(rng, lengths, options)
    groups = rollout_groups(sampling, rollout, rewards)
    penalty = np.array([[0, 0, -1], [-0.25, -1, -0.5]])
    expected = group_advantages(rewards + penalty)
    kept = lengths[lengths < 10].sum()
    for group, values, row in zip(groups, expected, lengths, strict=True):
        for one, value, n in zip(group.sequences, values, row, strict=True):
            assert one.weights == [0.0 if n == 10 else 1 / kept] * n
            np.testing.assert_array_equal(one.advantages, np.float32(value))
    found = rollout_metrics(sampling, rollout, rewards)
    assert found["reward"] == rewards.mean()
    assert found["overlong_penalty"] == penalty.mean()
    with pytest.raises(UserError, match=r"overlong_tokens is 5; .* max_tokens, which is 4"):
        GrpoSampling(max_tokens=4, overlong_tokens=5)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "none"])
def test_rows_without_a_reward_train_nothing_and_others_are_compared_without_them(rng, baseline):
    options = {"baseline": baseline, "normalisation": "sum"}
    sampling, rollout, rewards = sampled(rng, [[2, 3, 4], [2, 3, 4], [5, 5, 5]], options)
    rewards[0, 1], rewards[1, 1:] = np.nan, np.nan
    groups = rollout_groups(sampling, rollout, rewards)
    weights = [[one.weights[0] for one in group.sequences] for group in groups]
    assert weights == [[1, 0, 1], [1, 0, 0], [1, 1, 1]]
    rest = group_advantages(rewards[:1, [0, 2]], baseline)[0]
    alone = rewards[1, 0] if baseline == "none" else 0.0
    found = [[one.advantages[0] for one in group.sequences] for group in groups]
    np.testing.assert_allclose(found[0], [rest[0], 0, rest[1]], rtol=1e-6)
    np.testing.assert_allclose(found[1], [alone, 0, 0], rtol=1e-6)
    row = rollout_metrics(sampling, rollout, rewards)
    assert row["given_up"] == 3 / 9
    np.testing.assert_allclose(row["reward"], rewards[~np.isnan(rewards)].mean(), rtol=1e-12)


def test_prompts_of_equal_rewards_give_way_to_others(rng):
    sampling, rollout, rewards = sampled(rng, [[3, 3]] * 4, {"prompts": 3, "resample": 2})
    rewards[1] = -0.1
    _, chosen = trained(sampling, rollout, rewards)
    np.testing.assert_array_equal(chosen, rewards[[0, 1, 2]])  # the last of equal ones goes
    assert missing_prompts(sampling, rollout, rewards, 30) == 2  # one of two was useful
    assert missing_prompts(sampling, rollout, rewards, 5) == 1
    assert missing_prompts(sampling, rollout, rng.normal(size=(4, 2)), 30) == 0
    assert missing_prompts(sampling, *sampled(rng, [[3, 3]] * 8, {})[1:], 30) == 0
    at = further_indices(9, [1, 4], 3, 0)
    assert sorted(at) == [0, 2, 3, 5, 6, 7, 8]
    assert at == further_indices(9, [1, 4], 3, 0) != further_indices(9, [1, 4], 3, 1)


def test_rollouts_in_flight_come_back_from_a_checkpoint_as_they_were(rng):
    def completion(n):
        logprobs = (-rng.exponential(size=(2, n))).astype(np.float32).tolist()
        routes = rng.integers(-1, 9, (n, 2, 3)).astype(np.int16)
        return Completion(rng.integers(0, 99, n).tolist(), *logprobs, "stop", "é", routes)

    talk = dialogues.continued(dialogues.begun_by(completion(3)), [5] * 4, [7, 8], completion(2))
    part = dataclasses.replace(completion(4), finish="length")
    made = [[completion(3), parts.begun_by(part, 9)], [dataclasses.replace(talk, reward=0.5)]]
    drawn_by = [[Snapshot.known("ab" * 32, 7)], ["cd" * 32, Snapshot.known("ef" * 32, 8)]]
    rollout = Rollout(["examples"], ["prompts"], made, drawn_by, [[rng.normal()]])
    made_of = lambda name, step, *drawn: Rollout(["examples"], ["prompts"], *drawn)  # noqa: E731
    saved = json.loads(json.dumps(in_flight.to_json(rollout)))
    again = in_flight.from_json(saved, types.SimpleNamespace(restored=made_of), "p", 8)
    assert (again.rewards, again.drawn_by[1][0]) == (rollout.rewards, "cd" * 32)
    found = [(one.digest, one.step) for one in (again.drawn_by[0][0], again.drawn_by[1][1])]
    assert found == [("ab" * 32, 7), ("ef" * 32, 8)]
    for group, expected in zip(again.completions, made, strict=True):
        for one, other in zip(group, expected, strict=True):
            np.testing.assert_array_equal(one.routes, other.routes)
            bare = [dataclasses.replace(each, routes=None) for each in (one, other)]
            assert bare[0] == bare[1]  # also of the same class


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["abcd", "efgh", "ij"], (), ("abcdefghij", "abcdefghij", "length")),
        (["abcd", "efgh", "ij"], ("de",), ("abcde", "abc", "stop")),  # begins in the first part
        (["abcd", "efgh", "ij"], ("hij",), ("abcdefghij", "abcdefg", "stop")),
        (["abcd", "e"], (), ("abcde", "abcde", "stop")),
    ],
)
def test_completions_in_parts_end_where_whole_ones_do(pieces, stop, expected, rng):
    def decode(ids):
        return "".join(map(chr, ids))

    def part_of(text):
        logprobs = (-rng.exponential(size=(2, len(text)))).tolist()
        finish = "length" if len(text) == len(pieces[0]) or text == "ij" else "stop"
        return Completion([*map(ord, text)], *logprobs, finish, text)

    first, *others = drawn = [*map(part_of, pieces)]
    whole = parts.begun_by(first, 10)
    for part in others:
        if whole.is_open:
            whole = parts.continued(whole, [7, 8], part, 10, stop, decode)
    tokens, text, finish = expected
    assert (decode(whole.tokens), whole.text, whole.finish) == expected
    assert not whole.is_open
    assert whole.turns == [1 + i // 4 for i in range(len(tokens))]
    for name in ("logprobs", "drawn_logprobs"):
        joined = [x for part in drawn for x in getattr(part, name)]
        assert getattr(whole, name) == joined[: len(tokens)]


@pytest.mark.long
@pytest.mark.users  # the last bits of a rollout
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stale": 1},
        {"stale": 1, "parts": True},
        {"converses": True},
        {"stale": 1, "converses": True},
    ],
    ids=str,
)
def test_other_policies_change_nothing_of_a_policys_run(how, tmp_path):
    alone = revisions(tmp_path / "alone", {"b": 8}, **how)
    among = revisions(tmp_path / "among", {"a": 9, "b": 8, "z": 8}, **how)
    assert among["b"] == alone["b"]
    assert len(set(among.values())) == 3
