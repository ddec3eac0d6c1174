"""Shapes that a base is compiled for: one training step, and a pool of rollouts. Imports no jax."""

import dataclasses

from mint_jax.fields import setting


@dataclasses.dataclass(frozen=True)
class TrainShape:
    """Shape of one ``forward_backward``."""

    policies: int = setting("P, number of policies")
    rows: int = setting("B, rows of each policy")
    tokens: int = setting("T, tokens of a row")
    targets: int = setting("M, largest number of target tokens of a row")
    remat: str = setting(
        "values that the backward pass keeps: a name in models.transformer.REMAT", "full"
    )


@dataclasses.dataclass(frozen=True)
class RolloutShape:
    """Shape of a pool that holds all rollouts at full length, and of its programs."""

    adapters: int = setting("N, number of resident adapters; rows name theirs at run time")
    prompts: int = setting("Q, number of prompts")
    rollouts: int = setting(
        "G, rollouts of a prompt, which share its pages; Q G rows decode together"
    )
    prompt_tokens: int = setting("S, tokens of a prompt")
    new_tokens: int = setting("C, largest number of new tokens of a rollout")
    blocks: int = setting(
        "least number of 32-token blocks that one prefill reads, the same in each part of the mesh",
        16,
    )
