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
    """Builds the ``reasoning_gym`` dataset of a task, such as ``chain_sum``, with further options
    of ``reasoning_gym.create_dataset``. Raises ``UserError``: the package does not know the task or
    an option.
    """
    import reasoning_gym

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

    questions = {item["question"] for item in test}
    return ListEnvironment(
        [example(item) for item in train if item["question"] not in questions],
        [example(item) for item in test],
        lambda completion, e: float(train.score_answer(completion.strip(), e.data)),
    )
