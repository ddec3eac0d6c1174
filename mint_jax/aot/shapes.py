"""Shapes that a base is compiled for: one training step, and a pool of rollouts. Imports no jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainShape:
    """Shape of one ``forward_backward``.

    Attributes:
        policies: P.
        rows: B of each policy.
        tokens: T of a row.
        targets: largest M, targets of a row.
        remat: name in ``models.transformer.REMAT``: what the backward pass keeps.
    """

    policies: int
    rows: int
    tokens: int
    targets: int
    remat: str = "full"


@dataclasses.dataclass(frozen=True)
class RolloutShape:
    """Shape of a pool of all rollouts at full length, and of the ``prefill`` and ``decode`` that
    fill it.

    Attributes:
        adapters: N resident adapters; the adapter of a row is data.
        prompts: Q.
        rollouts: G of each prompt, which share its pages; Q G rows decode together.
        prompt_tokens: S of each prompt.
        new_tokens: largest C, new tokens of a rollout.
        blocks: minimum number of 32-token prompt blocks per prefill, split evenly over the mesh.
    """

    adapters: int
    prompts: int
    rollouts: int
    prompt_tokens: int
    new_tokens: int
    blocks: int = 16
