"""Answers that are kept for repeated requests, within a number of bytes."""

import pytest

from mint_jax.service.answers import Answers
from mint_jax.service.futures import Gone


def ended(answers, number, nbytes=10, delivered=False):
    answer, new = answers.begin("g", number, "body")
    assert new
    answers.end(answer, {"number": number}, nbytes=nbytes)
    if delivered:
        answers.delivered(answer)
    return answer


def test_ended_answers_are_kept_within_bytes():
    now = [0.0]
    answers = Answers(lambda: now[0], kept_bytes=100)
    waiting, _ = answers.begin("g", 1000, "body")  # has not ended
    kept = []
    for number in range(11):
        now[0] += 1
        kept.append(ended(answers, number, delivered=number in (3, 5)))
    for number, answer in enumerate(kept):
        if number in (3, 5, 0, 1):  # delivered ones, then the oldest, down to three quarters
            with pytest.raises(Gone):
                answers.find(answer.id)
            assert answers.begin("g", number, "body")[1], "its number is free again"
        else:
            assert answers.find(answer.id) is answer
    assert answers.find(waiting.id) is waiting


def test_an_answer_above_the_limit_replaces_all_others():
    answers = Answers(kept_bytes=100)
    small, large = ended(answers, 0), ended(answers, 1, 1000)
    assert answers.find(large.id) is large
    with pytest.raises(Gone):
        answers.find(small.id)
    answers.acknowledge([large.id])
    later = [ended(answers, number) for number in range(2, 12)]
    assert all(answers.find(one.id) is one for one in later), "its bytes are free again"
