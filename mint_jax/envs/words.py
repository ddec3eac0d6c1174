"""Word tasks about form: repeat a word, or write it in brackets."""

import random

from mint_jax.envs.env import Example, ListEnvironment

_TEXT = """
apple bridge candle desert engine forest garden hammer island jacket kettle ladder mirror needle orange pencil quarry
ribbon silver tunnel window anchor basket castle dragon feather guitar harbor insect jungle kitten lemon market napkin
ocean pepper rabbit saddle ticket violin walnut yellow button circle dinner escape finger golden helmet indigo jewel
knight letter monkey number office planet quiver rocket summer turtle valley winter camera doctor flower ginger hollow
marble noodle parrot puzzle school shadow spider sugar table thunder tiger tomato travel velvet village whistle wizard
"""  # noqa: E501
_WORDS = tuple(_TEXT.split())
HELD_OUT = 0.3


def _split(examples: list[Example], score, seed: int) -> ListEnvironment:
    random.Random(seed).shuffle(examples)
    count = round(len(examples) * HELD_OUT)
    return ListEnvironment(examples[count:], examples[:count], score)


def _says(completion: str, example: Example) -> float:
    """Returns 1 for exactly the answer, 0.5 up to case and a final full stop, 0.1 for text that
    contains it.
    """
    text = completion.strip()
    if text == example.answer:
        return 1.0
    if text.rstrip(".").lower() == example.answer.lower():
        return 0.5
    return 0.1 if example.answer.lower() in text.lower() else 0.0


def copy_word(seed: int = 0) -> ListEnvironment:
    """Builds a chat task with one example; the reply must be the word and nothing else."""
    opening = (
        {"role": "system", "content": "Repeat the word."},
        {"role": "user", "content": "cat"},
        {"role": "assistant", "content": "cat"},
    )
    return _split(
        [Example((*opening, {"role": "user", "content": word}), word) for word in _WORDS],
        _says,
        seed,
    )


def bracket_word(seed: int = 0) -> ListEnvironment:
    """Builds a completion task with two examples; the rest of the line must be the word in
    brackets.
    """

    def score(completion: str, example: Example) -> float:
        text = completion.strip()
        if text == f"[{example.answer}]":
            return 1.0
        return (
            0.1 * (example.answer in text) + 0.1 * text.startswith("[") + 0.1 * text.endswith("]")
        )

    return _split(
        [Example(f"cat -> [cat]\nfish -> [fish]\n{word} ->", word) for word in _WORDS], score, seed
    )
