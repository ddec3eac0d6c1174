"""Tasks of digits, words and sentences: splits are complete and apart, rewards on cases by hand."""

import json

import pytest

from mint_jax.envs import small
from mint_jax.envs.env import Example

NUMBERS = {"12": 1.0, "12.": 0.2, "It is 12, I think": 0.2, "12 12": 0.1, "112": 0.0, "": 0.0}
WORDS = {" apple\n": 1.0, "APPLE.": 0.5, "The word is Apple!": 0.1, "cat": 0.0}
BRACKETS = {" [apple]\n": 1.0, "[ apple ]": 0.3, "[apple": 0.2, "apple": 0.1, "[cat]": 0.2}
BRACKETS["cat"] = 0.0
PERSON = '{"name": "Mia", "age": 30, "city": "Rome"}'
FIELDS = {
    f" {PERSON}\n": 1.0,
    f"```json\n{PERSON}\n```": 0.9,
    '{"city": "Rome", "age": 30, "name": "Mia"}': 1.0,
    '{"name": "Mia", "age": "30", "city": "Rome"}': 0.3 + 0.7 * 2 / 3,
    '{"name": "Mia", "age": 30, "city": "Rome", "country": ""}': 0.3 + 0.7 * 3 / 4,
    '{"name": "Mia"} and {"age": 30}': 0.2 + 0.7 / 3,
    "{}": 0.3,
    '{"name": Mia}': 0.0,
    "Mia, 30, Rome": 0.0,
}


@pytest.mark.parametrize(
    ("task", "count"),
    [(small.digit_sum, 100), (small.larger_of_two, 90), (small.json_fields, 16 * 13)],
)
def test_splits_are_disjoint_and_complete(task, count):
    env = task(seed=7)
    train, held_out = ({str(e.messages) for e in split} for split in (env.train, env.held_out))
    assert not train & held_out
    assert len(train) + len(held_out) == len(env.train) + len(env.held_out) == count
    assert len(held_out) == round(0.3 * count)


@pytest.mark.parametrize(
    ("task", "answer", "rewards"),
    [
        (small.digit_sum, "12", NUMBERS),
        (small.larger_of_two, "12", NUMBERS),
        (small.copy_word, "apple", WORDS),
        (small.bracket_word, "apple", BRACKETS),
        (small.json_fields, PERSON, FIELDS),
    ],
)
def test_rewards(task, answer, rewards):
    for completion, reward in rewards.items():
        # sums of 0.1
        assert task().reward(completion, Example("", answer)) == pytest.approx(reward), completion


def test_a_sentence_names_each_field_of_its_answer():
    for example in small.json_fields(seed=3).train:
        sentence = str(example.messages).split("\\n")[-1]
        assert all(str(value) in sentence for value in json.loads(example.answer).values())
