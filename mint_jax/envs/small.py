"""Tasks of one digit, one word or one sentence, with completions of a line. A model of 135M
parameters solves them half of the time or less, so learning starts at once.
"""

import itertools
import json
import random
import re
from collections.abc import Callable

from mint_jax.envs.env import Example, ListEnvironment

HELD_OUT = 0.3  # of all examples
_TEXT = """
apple bridge candle desert engine forest garden hammer island jacket kettle ladder mirror needle orange pencil quarry
ribbon silver tunnel window anchor basket castle dragon feather guitar harbor insect jungle kitten lemon market napkin
ocean pepper rabbit saddle ticket violin walnut yellow button circle dinner escape finger golden helmet indigo jewel
knight letter monkey number office planet quiver rocket summer turtle valley winter camera doctor flower ginger hollow
marble noodle parrot puzzle school shadow spider sugar table thunder tiger tomato travel velvet village whistle wizard
"""  # noqa: E501
_WORDS = _TEXT.split()
_SCHEMA = {"name": str, "age": int, "city": str}
_SENTENCES = (
    "{name} is {age} and lives in {city}.",
    "In {city} you will find {name}, aged {age}.",
    "{age} years ago {name} was born in {city}.",
)
_NAMES = "Ada Boris Chloe Diego Emma Farid Grace Hugo Ines Jonas Kira Liam Mona Nils Olga Paul"
_CITIES = "Athens Berlin Cairo Delhi Geneva Lagos Lima London Madrid Oslo Paris Rome Seoul"


def digit_sum(seed: int = 0) -> ListEnvironment:
    """Builds the task of a sum of two digits, after one example."""
    pairs = itertools.product(range(10), repeat=2)
    return _split([Example(f"1 + 1 = 2\n{a} + {b} =", str(a + b)) for a, b in pairs], _number, seed)


def larger_of_two(seed: int = 0) -> ListEnvironment:
    """Builds the task of the larger of two digits, after one example."""
    pairs = itertools.permutations(range(10), 2)
    examples = [Example(f"2 or 9: 9\n{a} or {b}:", str(max(a, b))) for a, b in pairs]
    return _split(examples, _number, seed)


def copy_word(seed: int = 0) -> ListEnvironment:
    """Builds a chat task with one example; the reply must be the word and nothing else."""
    opening = (
        {"role": "system", "content": "Repeat the word."},
        {"role": "user", "content": "cat"},
        {"role": "assistant", "content": "cat"},
    )
    asked = [(*opening, {"role": "user", "content": word}) for word in _WORDS]
    return _split([Example(*pair) for pair in zip(asked, _WORDS)], _word, seed)


def bracket_word(seed: int = 0) -> ListEnvironment:
    """Builds the task to write a word in brackets, after two examples."""
    asked = [f"cat -> [cat]\nfish -> [fish]\n{word} ->" for word in _WORDS]
    return _split([Example(*pair) for pair in zip(asked, _WORDS)], _brackets, seed)


def json_fields(seed: int = 0) -> ListEnvironment:
    """Builds the task to write the person of a sentence as JSON: a name, an age and a city."""
    draw, examples = random.Random(seed), []
    for name, city in itertools.product(_NAMES.split(), _CITIES.split()):
        person = {"name": name, "age": draw.randint(18, 80), "city": city}
        sentence = draw.choice(_SENTENCES).format(**person)
        ask = f'Write JSON with the keys "name", "age" (a number) and "city".\n{sentence}'
        examples.append(Example(({"role": "user", "content": ask},), json.dumps(person)))
    return _split(examples, _fields, seed)


def _split(
    examples: list[Example], score: Callable[[str, Example], float], seed: int
) -> ListEnvironment:
    random.Random(seed).shuffle(examples)
    count = round(len(examples) * HELD_OUT)
    return ListEnvironment(examples[count:], examples[:count], score)


def _number(completion: str, example: Example) -> float:
    """Returns 1 for the number alone, 0.2 for one in a text, 0.1 for one of several."""
    text = completion.strip()
    if text == example.answer:
        return 1.0
    numbers = re.findall(r"\d+", text)
    if numbers == [example.answer]:
        return 0.2
    return 0.1 if example.answer in numbers else 0.0


def _word(completion: str, example: Example) -> float:
    """Returns 1 for the answer, 0.5 up to case and a full stop, 0.1 for text with it."""
    text, answer = completion.strip(), example.answer
    if text == answer:
        return 1.0
    if text.rstrip(".").lower() == answer.lower():
        return 0.5
    return 0.1 if answer.lower() in text.lower() else 0.0


def _brackets(completion: str, example: Example) -> float:
    text, answer = completion.strip(), example.answer
    if text == f"[{answer}]":
        return 1.0
    return 0.1 * (answer in text) + 0.1 * text.startswith("[") + 0.1 * text.endswith("]")


def _fields(completion: str, example: Example) -> float:
    """Returns 0.2 for a JSON object, up to 0.7 for its fields of the schema, by the share that is
    right, and 0.1 if nothing else is written.
    """
    if (found := re.search(r"\{[^{}]*\}", completion)) is None:
        return 0.0
    try:
        person = json.loads(found[0])
    except ValueError:
        return 0.0
    answer = json.loads(example.answer)
    right = sum(
        type(person.get(k)) is kind and person[k] == answer[k] for k, kind in _SCHEMA.items()
    )
    share = right / max(len(_SCHEMA), len(person))
    return (2 + 7 * share + (completion.strip() == found[0])) / 10
