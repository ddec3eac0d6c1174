"""A task for inspect-ai: ``inspect eval inspect_ai_task.py -T data=FILE``. Each line of FILE has an
input and the target that is right.

It runs in the harness's own environment, and imports nothing of ours.
"""

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def mint(data: str) -> Task:
    return Task(dataset=json_dataset(data), solver=generate(), scorer=match(location="exact"))
