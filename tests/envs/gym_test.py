"""Tasks of reasoning-gym: items and scores are those of the package, splits are apart."""

import pytest
import reasoning_gym

from mint_jax.envs.gym import reasoning_gym_task
from mint_jax.errors import UserError

OPTIONS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


def test_items_and_scores_are_the_packages(rng):
    seed = int(rng.integers(10_000))
    env = reasoning_gym_task(
        "chain_sum", size=40, held_out=10, seed=seed, instruction="Only the number.", **OPTIONS
    )
    theirs = reasoning_gym.create_dataset("chain_sum", size=40, seed=seed, **OPTIONS)
    answers = {f"{item['question']}\nOnly the number.": item["answer"] for item in theirs}
    assert len(env.held_out) == 10
    assert env.train
    for e in env.train:
        assert [m["role"] for m in e.messages] == ["user"]
        assert answers[e.messages[0]["content"]] == e.answer
        for text in (e.answer, f" {e.answer}\n", f"it is {e.answer}", str(int(e.answer) + 1), ""):
            assert env.reward(text, e) == theirs.score_answer(text.strip(), e.data)
        assert env.reward(f"{e.answer}\n", e) == 1.0
    for e in env.held_out:
        assert env.reward(e.answer, e) == 1.0
        assert env.reward(str(int(e.answer) + 1), e) < 1.0


def test_splits_are_disjoint_even_for_a_task_with_few_questions(rng):
    few = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    seed = int(rng.integers(10_000))
    env = reasoning_gym_task("chain_sum", size=300, held_out=30, seed=seed, **few)
    train, held_out = ({e.messages[0]["content"] for e in s} for s in (env.train, env.held_out))
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize(
    ("task", "options"), [("no_such_task", {}), ("chain_sum", {"no_such_option": 1})]
)
def test_unknown_tasks_and_bad_options_are_refused(task, options):
    with pytest.raises(UserError, match=f"reasoning_gym cannot make task '{task}'"):
        reasoning_gym_task(task, **options)
