"""Questions of a file: GSM8K's answers, numbers and text, splits, columns that are missing."""

import json

import pytest

from mint_jax.envs.env import Example
from mint_jax.envs.questions import questions
from mint_jax.errors import UserError


@pytest.fixture
def env(tmp_path):
    """``env(rows, **options)`` writes a file and reads it as an environment."""

    def make(rows, name="rows.jsonl", **options):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return questions(str(tmp_path / name), **options)

    return make


def rows(n, first=0) -> list[dict]:
    return [
        {"question": f"{i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"}
        for i in range(first, first + n)
    ]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("72", "The answer is 72.", 1.0),
        ("72", "72 clips and 3 more", 0.0),
        ("72", "-72", 0.0),
        ("1234", "$1,234.00", 1.0),
        ("3.50", "3.5", 1.0),
        ("Paris", "It is Paris", 0.0),
        ("Paris, France", "Paris, France", 1.0),
        ("B2", "C2", 0.0),  # no number, though it has one in it
    ],
)
def test_rewards(env, answer, completion, reward):
    e = env([{"question": "q", "answer": f"because\n#### {answer}"}], held_out=0)
    assert e.reward(completion, e.train[0]) == reward


def test_a_second_file_is_held_out(env, tmp_path):
    env(rows(2, first=100), name="test.jsonl")
    e = env(rows(3), held_out=str(tmp_path / "test.jsonl"))
    assert [len(e.train), len(e.held_out)] == [3, 2]
    assert e.held_out[0].answer == "101"


def test_other_columns_and_whole_chats(env):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    columns = {"question": "prompt", "answer": "gold"}
    e = env([{"prompt": chat, "gold": 5}], held_out=0, instruction="not for chats", **columns)
    assert e.train == [Example(tuple(chat), "5")]


@pytest.mark.parametrize("row", [{"answer": "1"}, {"question": "q"}])
def test_missing_columns_are_refused(env, row):
    message = r"has no column '(question|answer)'; it has (question|answer)"
    with pytest.raises(UserError, match=message):
        env([*rows(2), row])
