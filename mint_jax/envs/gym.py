"""Tasks of ``reasoning-gym`` (the ``data`` extra): generated questions with their own verifiers."""

from typing import Any

from mint_jax.envs.env import Example, ListEnvironment
from mint_jax.errors import UserError


def reasoning_gym_task(
    task: str,
    size: int = 512,
    held_out: int = 64,
    seed: int = 0,
    instruction: str = "Reply with the answer only.",
    **options: Any,
) -> ListEnvironment:
    """Builds a ``reasoning_gym`` dataset as an environment.

    Args:
        task: name of the task, such as ``chain_sum``.
        size, held_out: number of training and held-out items. Their seeds differ, and held-out
            questions are removed from training.
        options: passed to ``reasoning_gym.create_dataset``.

    Raises:
        UserError: the package is missing, or it does not know the task or an option.
    """
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            "environment 'reasoning_gym' needs the package reasoning-gym: pip install"
            " 'mint-jax[data]'"
        ) from None
    try:
        train = reasoning_gym.create_dataset(task, size=size, seed=seed, **options)
        test = reasoning_gym.create_dataset(task, size=held_out, seed=seed + 1_000_003, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(
            f"reasoning_gym cannot make task {task!r} with options {options} ({error})"
        ) from None

    def example(item: dict[str, Any]) -> Example:
        messages = ({"role": "user", "content": f"{item['question']}\n{instruction}".strip()},)
        return Example(messages, str(item["answer"]), item)

    held_out_rows = [example(item) for item in test]
    questions = {item["question"] for item in test}
    rows = [example(item) for item in train if item["question"] not in questions]
    return ListEnvironment(
        rows,
        held_out_rows,
        lambda completion, e: float(train.score_answer(completion.strip(), e.data)),
    )
