"""Protocols of tasks: prompts with a reward for a completion's text, or with an environment that
answers each turn of a conversation.

Rewards and steps run on the host, in threads or worker processes, while the devices work for other
policies. They must be pure functions.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mint_jax.errors import UserError, choice, own_traceback

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Example:
    """One prompt, and the data of its reward.

    Attributes:
        messages: the conversation so far, or plain text for a base without a chat template.
        answer: the expected answer; the environment defines its meaning.
        data: further data of the reward.
    """

    messages: tuple[Message, ...] | str
    answer: str
    data: Any = None


class Unscored(Exception):
    """Raised by a reward or step that found no result: its row is given up, and trains nothing."""


class Environment(Protocol):
    """A task with verifiable rewards. ``concurrency``, if an environment has it, is the number of
    calls that may run at once for one policy; 1 otherwise.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]

    def reward(self, completion: str, example: Example) -> float:
        """Returns a finite number; higher is better."""
        ...


@dataclasses.dataclass(frozen=True)
class StepResult:
    """An environment's answer to one turn of a conversation.

    Attributes:
        observation: read by the policy before its next turn: messages for the chat template, or
            text after a prompt of text. Empty: the policy goes on where it stopped.
        reward: a finite number; the reward of a conversation is the sum over its turns.
        done: the conversation has ended, and nobody reads the observation.
    """

    observation: Sequence[Message] | str = ()
    reward: float = 0.0
    done: bool = False


class Conversation(Protocol):
    """A task of several turns."""

    train: Sequence[Example]
    held_out: Sequence[Example]

    def step(self, completions: Sequence[str], example: Example) -> StepResult:
        """Answers the last of the policy's turns; ``completions`` has the text of all of them."""
        ...


# config name -> "module:factory"; imported when used, since some need an extra
REGISTRY: dict[str, Any] = {
    "digit_sum": "mint_jax.envs.small:digit_sum",
    "larger_of_two": "mint_jax.envs.small:larger_of_two",
    "copy_word": "mint_jax.envs.small:copy_word",
    "bracket_word": "mint_jax.envs.small:bracket_word",
    "json_fields": "mint_jax.envs.small:json_fields",
    "higher_lower": "mint_jax.envs.games:higher_lower",
    "jsonl": "mint_jax.envs.questions:questions",
    "judge": "mint_jax.envs.judge:judged",
    "reasoning_gym": "mint_jax.envs.gym:reasoning_gym_task",
}
NEEDS = {"reasoning_gym": "reasoning_gym"}  # name -> package of the ``data`` extra


def register_environment(name: str, factory: Callable[..., Environment]) -> None:
    """Adds an environment under a name for ``env.name`` in a config. The config's further settings
    are the factory's arguments. A second factory replaces the first.

    Raises:
        UserError: a shipped environment has the name, or the factory is not callable.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise UserError(
            f"name of an environment is {name!r}; expected text without a colon, such as 'my_task'"
        )
    if isinstance(REGISTRY.get(name), str):
        raise UserError(f"environment {name!r} is shipped with mint_jax: choose another name")
    if not callable(factory):
        raise UserError(
            f"environment {name!r} is {factory!r:.80}; expected a function that returns an"
            " environment"
        )
    REGISTRY[name] = factory


def check_options(name: str, **options: Any) -> Any:
    """Returns the factory of an environment. Raises ``UserError``: wrong name or options."""
    if (needed := NEEDS.get(name)) and importlib.util.find_spec(needed) is None:
        raise UserError(
            f"environment {name!r} needs the package {needed}, which is not installed: pip install"
            " 'mint-jax[data]'"
        )
    factory = _factory(name)
    if not callable(factory):
        raise UserError(
            f"environment {name!r} is {_shown(factory)}; expected a function that returns an"
            " environment"
        )
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a builtin without a signature
        return factory
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = f"{getattr(factory, '__name__', factory)}{signature}"
        raise UserError(
            f"environment {name!r} does not take these options ({error}): set what {takes} names"
        ) from None
    return factory


def make(name: str, **options: Any) -> Any:
    """Builds the ``Environment`` or ``Conversation`` of a name, or of the user's
    ``module:factory``. Raises ``UserError``.
    """
    factory = check_options(name, **options)
    try:
        environment = factory(**options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"environment {name!r} raised {type(error).__name__}: {error}: fix"
            f" it\n{own_traceback(error)}"
        ) from None
    _check(f"environment {name!r}", environment)
    return environment


def _factory(name: str) -> Any:
    """Returns the factory that a config name refers to."""
    target = REGISTRY.get(name, name)
    if callable(target):
        return target
    module, _, factory = target.partition(":")
    if not module or not factory.isidentifier():
        raise choice("environment", name, [*REGISTRY, "module:factory"])
    failed = f"environment {name!r} could not be imported"
    try:
        found = importlib.import_module(module)
    except Exception as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise UserError(
                f"{failed} ({error}): check the module path; the config's folder, the current"
                " folder and installed packages are searched"
            ) from None
        raise UserError(
            f"{failed} ({type(error).__name__}: {error}): fix it, or install what it"
            f" needs\n{own_traceback(error)}"
        ) from None
    if not hasattr(found, factory):
        public = [n for n, one in vars(found).items() if n[0] != "_" and callable(one)]
        have = ", ".join(public) or "nothing to call"
        raise UserError(f"{failed} ({module} has no {factory!r}): it has {have}")
    return getattr(found, factory)


def _check(name: str, environment: Any) -> None:
    """Raises ``UserError`` if an object is not an environment."""
    if inspect.iscoroutine(environment):
        environment.close()
        raise UserError(f"{name} is made by an async function: use a plain function")
    answers = "step" if is_conversation(environment) else "reward"
    for part in ("train", "held_out", answers):
        if not hasattr(environment, part):
            raise UserError(
                f"{name} is {_shown(environment)}, which has no {part}; expected an environment:"
                " an object with train, held_out and reward, such as envs.env.ListEnvironment, or"
                " with step in place of reward, such as envs.env.ListConversation"
            )
    if answers == "step" and hasattr(environment, "reward"):
        raise UserError(
            f"{name} is {_shown(environment)}, which has both reward and step: keep reward for one"
            " turn, or step for a conversation, whose results carry the rewards"
        )

    def need(is_right: bool, part: str, value: Any, expected: str) -> None:
        if not is_right:
            raise UserError(f"{part} of {name} is {_shown(value)}; expected {expected}")

    for split in ("train", "held_out"):
        examples = getattr(environment, split)
        is_list = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
        is_list = is_list and not isinstance(examples, str | dict)
        need(is_list, split, examples, "a list of envs.env.Example")
        if not len(examples):
            raise UserError(
                f"{name} has no {split} examples: its dataset is empty, check its path and sizes"
            )
        is_example = isinstance(examples[0], Example)
        need(is_example, f"{split}[0]", examples[0], "an envs.env.Example")
    call, takes = getattr(environment, answers), {"step": "completions", "reward": "completion"}
    need(callable(call), answers, call, f"a function of ({takes[answers]}, example)")
    count = getattr(environment, "concurrency", 1)
    is_count = isinstance(count, int) and count >= 1
    need(is_count, "concurrency", count, "the number of calls at once, at least 1")
    if inspect.iscoroutinefunction(call):
        raise UserError(
            f"{answers} of {name} is async; rewards run in threads, several at once: use a plain"
            " function"
        )


def is_conversation(environment: Any) -> bool:
    """Returns True for an environment of several turns."""
    return hasattr(environment, "step")


def need_single_turn(name: str, environment: Any) -> None:
    """Raises ``UserError`` for a conversation, where only completions of a prompt are scored."""
    if is_conversation(environment):
        raise UserError(
            f"environment {name!r} is a conversation, and only completions of one turn are scored"
            " here: use the jobs evaluate or grpo, which play conversations"
        )


def _shown(value: Any) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


@dataclasses.dataclass(frozen=True)
class ListEnvironment:
    """Environment made of two lists and a score function of (completion, example)."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    score: Any
    concurrency: int = 1

    def reward(self, completion: str, example: Example) -> float:
        return self.score(completion, example)


@dataclasses.dataclass(frozen=True)
class ListConversation:
    """Conversation made of two lists and a function of (completions, example)."""

    train: Sequence[Example]
    held_out: Sequence[Example]
    answer: Callable[[Sequence[str], Example], StepResult]
    concurrency: int = 1

    def step(self, completions: Sequence[str], example: Example) -> StepResult:
        return self.answer(completions, example)
