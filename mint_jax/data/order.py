"""The order of training examples: a function of seed and step, so that a data position is just a
step number.
"""

import functools

import numpy as np


def epoch_indices(examples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Indices of step ``step`` when ``per_step`` examples a step walk through a new permutation
    every epoch.
    """
    out = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, at = divmod(position, examples)
        out.append(int(_permutation(examples, seed, epoch)[at]))
    return out


@functools.lru_cache(maxsize=64)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
