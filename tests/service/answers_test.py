"""Answers that are kept for clients that ask again: within bytes, delivered ones go first."""

import pytest

from mint_jax.service.answers import Answers
from mint_jax.service.futures import Gone


def ended(answers, number, nbytes=10, delivered=False):
    answer, new = answers.begin("g", number, "body")
    assert new
    answer.what = object()
    answers.end(answer, {"number": number}, nbytes=nbytes)
    assert answer.what is None  # a stream, and all that it has, is of no more use
    if delivered:
        answers.delivered(answer)
    return answer


def test_answers_that_ended_are_kept_within_bytes():
    now = [0.0]
    answers = Answers(lambda: now[0], kept_bytes=100)
    waiting, _ = answers.begin("g", 1000, "body")  # has not ended
    kept = []
    for number in range(10):
        now[0] += 1
        kept.append(ended(answers, number, delivered=number in (3, 5)))
    assert len(answers) == 11
    now[0] += 1
    kept.append(ended(answers, 10))
    for number, answer in enumerate(kept):
        if number in (3, 5, 0, 1):  # delivered ones, then the oldest, down to three quarters
            with pytest.raises(Gone):
                answers.find(answer.id)
            assert answers.begin("g", number, "body")[1], "its number is free again"
        else:
            assert answers.find(answer.id) is answer
    assert answers.find(waiting.id) is waiting


def test_one_answer_that_is_too_large_by_itself_is_delivered_all_the_same():
    answers = Answers(kept_bytes=100)
    small, large = ended(answers, 0), ended(answers, 1, 1000)
    assert answers.find(large.id) is large
    with pytest.raises(Gone):
        answers.find(small.id)
    answers.acknowledge([large.id])
    # nothing of the large one is counted
    assert [ended(answers, number).id for number in range(2, 12)] == [*answers._answers]
