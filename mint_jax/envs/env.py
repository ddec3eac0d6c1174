"""The protocol between tasks and jobs: prompts with answers, and a reward for a completion's text.

Rewards run on the host, in threads, while the devices work for other policies: they must be pure functions.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from mint_jax.errors import UserError, choice

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt and what its reward needs to know.

    Attributes:
        messages: the conversation so far, or plain text for a base without a chat template.
        answer: the expected answer; its meaning is the environment's.
        data: anything else the reward needs.
    """

    messages: tuple[Message, ...] | str
    answer: str
    data: Any = None


class Environment(Protocol):
    """A task with verifiable rewards."""

    train: Sequence[Example]
    held_out: Sequence[Example]

    def reward(self, completion: str, example: Example) -> float:
        """A finite number, higher is better."""
        ...


REGISTRY = {  # config name -> "module:factory"; imported when used, for an environment may need an extra
    "digit_sum": "mint_jax.envs.digits:digit_sum",
    "larger_of_two": "mint_jax.envs.digits:larger_of_two",
    "copy_word": "mint_jax.envs.words:copy_word",
    "bracket_word": "mint_jax.envs.words:bracket_word",
    "jsonl": "mint_jax.envs.questions:questions",
    "reasoning_gym": "mint_jax.envs.gym:reasoning_gym_task",
}


def make(name: str, **options: Any) -> Environment:
    """The environment called ``name``, or ``module:factory`` of the user's own.

    Raises:
        UserError: an unknown name, options the factory does not take, or no examples.
    """
    target = REGISTRY.get(name, name)
    module, _, factory = target.partition(":")
    if not module or not factory.isidentifier():
        raise choice("environment", name, [*REGISTRY, "module:factory"])
    try:
        environment = getattr(importlib.import_module(module), factory)(**options)
    except (ImportError, AttributeError) as error:
        raise UserError(f"environment {name!r} could not be imported ({error}): check the module path, or install what it needs") from None
    except TypeError as error:
        raise UserError(f"environment {name!r} does not take these options ({error})") from None
    for split in ("train", "held_out"):
        if not getattr(environment, split):
            raise UserError(f"environment {name!r} has no {split} examples: its dataset is empty, check its path and sizes")
    return environment


@dataclasses.dataclass(frozen=True)
class ListEnvironment:
    """An environment made of two lists and a function of (completion, example)."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    score: Any

    def reward(self, completion: str, example: Example) -> float:
        return self.score(completion, example)
