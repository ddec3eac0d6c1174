"""Shapes that a base is compiled for: one training step, and a pool of rollouts. Imports no jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainShape:
    """One ``forward_backward``.

    Attributes:
        policies: P.
        rows: B of each policy.
        tokens: T of a row.
        targets: M of a row's tokens, at most.
        remat: what the backward pass keeps: a name in models.transformer.REMAT.
    """

    policies: int
    rows: int
    tokens: int
    targets: int
    remat: str = "full"


@dataclasses.dataclass(frozen=True)
class RolloutShape:
    """A pool that holds all rollouts at full length, and the ``prefill`` and ``decode`` that fill
    it.

    Attributes:
        adapters: N that are resident; which row names which is data.
        prompts: Q.
        rollouts: G of each prompt, which share its pages; Q G rows decode together.
        prompt_tokens: S of each prompt.
        new_tokens: C of each rollout, at most.
        blocks: of 32 tokens of prompts that one prefill reads, at least: as many in each part of
            the mesh.
    """

    adapters: int
    prompts: int
    rollouts: int
    prompt_tokens: int
    new_tokens: int
    blocks: int = 16
