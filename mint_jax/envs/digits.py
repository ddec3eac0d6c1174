"""One-digit arithmetic as text completion. A model of 135M parameters solves it half of the time,
so learning starts at once.
"""

import itertools
import random
import re

from mint_jax.envs.env import Example, ListEnvironment

HELD_OUT = 0.3  # of all pairs of digits


def _bare_number(completion: str, example: Example) -> float:
    """Returns 1 for the number alone, 0.2 for text in which it is the only number, 0.1 if it is one
    of several.
    """
    text = completion.strip()
    if text == example.answer:
        return 1.0
    numbers = re.findall(r"\d+", text)
    if numbers == [example.answer]:
        return 0.2
    return 0.1 if example.answer in numbers else 0.0


def _split(examples: list[Example], seed: int) -> ListEnvironment:
    random.Random(seed).shuffle(examples)
    count = round(len(examples) * HELD_OUT)
    return ListEnvironment(examples[count:], examples[:count], _bare_number)


def digit_sum(seed: int = 0) -> ListEnvironment:
    """Builds the task ``1 + 1 = 2`` and then a sum of two digits; the rest of the line must be the
    bare number.
    """
    pairs = itertools.product(range(10), repeat=2)
    return _split([Example(f"1 + 1 = 2\n{a} + {b} =", str(a + b)) for a, b in pairs], seed)


def larger_of_two(seed: int = 0) -> ListEnvironment:
    """Builds the task of the larger of two digits, after one example; the rest of the line must be
    the bare number.
    """
    pairs = itertools.permutations(range(10), 2)
    return _split([Example(f"2 or 9: 9\n{a} or {b}:", str(max(a, b))) for a, b in pairs], seed)
