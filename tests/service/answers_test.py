"""Answers that are kept for repeated requests, within a number of bytes."""

import pytest

from mint_jax.service.answers import Answers
from mint_jax.service.futures import Gone


def test_ended_answers_are_kept_within_bytes():
    now = [0.0]
    answers = Answers(lambda: now[0], kept_bytes=100)
    waiting, _ = answers.begin("g", 1000, "body")  # has not ended
    kept = []
    for number in range(11):
        now[0] += 1
        answer, _ = answers.begin("g", number, "body")
        answers.end(answer, {"number": number}, nbytes=10)
        if number in (3, 5):
            answers.delivered(answer)
        kept.append(answer)
    for number, answer in enumerate(kept):
        if number in (3, 5, 0, 1):  # delivered ones, then the oldest, down to three quarters
            with pytest.raises(Gone):
                answers.find(answer.id)
            assert answers.begin("g", number, "body")[1], "its number is free again"
        else:
            assert answers.find(answer.id) is answer
    assert answers.find(waiting.id) is waiting
