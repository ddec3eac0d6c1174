"""Order of training examples: a function of seed and step, so the step number is the data
position.
"""

import functools

import numpy as np


def epoch_indices(examples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Returns the example indices of one step; each epoch is a new permutation."""
    out = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, at = divmod(position, examples)
        out.append(int(_permutation(examples, seed, epoch)[at]))
    return out


@functools.lru_cache(maxsize=64)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
