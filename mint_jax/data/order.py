"""Order of training examples, a function of seed and step: the step is the data position."""

import functools

import numpy as np


def epoch_indices(examples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Returns the example indices of one step; each epoch is a new permutation."""
    places = (divmod(i, examples) for i in range(step * per_step, (step + 1) * per_step))
    return [int(_permutation(examples, seed, epoch)[at]) for epoch, at in places]


@functools.lru_cache(maxsize=64)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
