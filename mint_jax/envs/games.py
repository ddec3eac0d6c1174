"""Games of several turns."""

import random
import re
from collections.abc import Sequence

from mint_jax.envs.env import Example, ListConversation, StepResult

_HELD_OUT = 0.25


def higher_lower(most: int = 20, guesses: int = 3, seed: int = 0) -> ListConversation:
    """Builds the game to guess a number from 1 to ``most``; each wrong guess is answered with
    "higher" or "lower". A hit earns 1, and the last guess otherwise up to 0.5, by its distance.
    """
    rules = f"Guess my number, 1 to {most}. Reply with one number only."
    asked = ({"role": "user", "content": rules},)
    examples = [Example(asked, str(number)) for number in range(1, most + 1)]
    random.Random(seed).shuffle(examples)

    def answer(texts: Sequence[str], example: Example) -> StepResult:
        secret = int(example.answer)
        if (found := re.fullmatch(r"\s*(\d{1,9})\.?\s*", texts[-1])) is None:
            return StepResult(done=True)  # no number alone
        guess = int(found[1])
        if guess == secret:
            return StepResult(reward=1.0, done=True)
        if len(texts) == guesses:
            return StepResult(reward=max(0.0, 0.5 - abs(guess - secret) / most), done=True)
        hint = "higher" if guess < secret else "lower"
        return StepResult(({"role": "user", "content": f"My number is {hint}."},))

    count = max(1, round(_HELD_OUT * most))
    return ListConversation(examples[count:], examples[:count], answer)
