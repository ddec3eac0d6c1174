"""Evaluation of a policy, a revision or the base: mean held-out reward and its standard error."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mint_jax.api.inputs import Prompt, one_by_one
from mint_jax.envs import env as env_lib
from mint_jax.envs import scoring
from mint_jax.envs.env import Environment, Example, ListEnvironment
from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion

Task = str | Environment | Callable[[str, Any], float]


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """Rewards of completions of held-out prompts, one list for each prompt.

    Attributes:
        rewards: NaN where one was given up.
        mean: mean over prompts of each prompt's mean reward.
        standard_error: of ``mean``, from the spread between prompts; NaN for one prompt.
    """

    mean: float
    standard_error: float
    rewards: list[list[float]]
    completions: list[list[Completion]]

    def __repr__(self) -> str:
        return (
            f"Evaluation({self.mean:.4g} ± {self.standard_error:.2g}, {len(self.rewards)} prompts)"
        )


def task_of(task: Any, prompts: Any) -> tuple[Any, list[Example]]:
    """Returns the task's environment and its held-out examples, or these prompts."""
    name = task if isinstance(task, str) else type(task).__name__
    task = env_lib.make(task) if isinstance(task, str) else task
    env_lib.need_single_turn(name, task)
    if callable(task) and not hasattr(task, "reward"):
        if prompts is None:
            raise UserError("prompts are missing: a reward function is evaluated on prompts=[...]")
        fn = task
        task = ListEnvironment((), (), lambda text, example: fn(text, example.messages))
    elif not callable(getattr(task, "reward", None)) or not hasattr(task, "held_out"):
        raise UserError(
            f"task is {task!r:.80}; expected a function of (text, prompt), an environment, or the"
            " name of one"
        )
    if prompts is None:
        return task, list(task.held_out)
    given = one_by_one(prompts, "prompts")
    return task, [one if isinstance(one, Example) else Example(one, "") for one in given]


def evaluate(
    who: str,
    task: Task,
    prompts: Sequence[Prompt] | None,
    examples: int | None,
    sample: Callable[[list[Prompt]], list[list[Completion]]],
) -> Evaluation:
    """Samples held-out prompts and scores the completions."""
    env, held_out = task_of(task, prompts)
    if examples is not None and (type(examples) is not int or examples < 1):
        raise UserError(
            f"examples is {examples!r}; expected a number of held-out prompts, at least 1"
        )
    held_out = held_out[:examples]
    if not held_out:
        raise UserError("the task has no held-out prompts: give prompts=[...]")
    completions = sample([one.messages for one in held_out])
    rewards = scoring.each(
        lambda row: scoring.score(who, env, row[0].text or "", row[1]),
        [[(c, example) for c in some] for some, example in zip(completions, held_out)],
        env,
    )
    scoring.check_any(who, np.array(rewards))
    means = np.array([np.nanmean(row) for row in rewards if not np.isnan(row).all()], np.float64)
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return Evaluation(float(means.mean()), error, rewards, completions)
