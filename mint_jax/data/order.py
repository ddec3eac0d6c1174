"""Order of training examples, a function of seed and step: the step is the data position."""

import functools
from collections.abc import Sequence

import numpy as np


def epoch_indices(examples: int, per_step: int, seed: int, step: int) -> list[int]:
    """Returns the example indices of one step; each epoch is a new permutation."""
    places = (divmod(i, examples) for i in range(step * per_step, (step + 1) * per_step))
    return [int(_permutation(examples, seed, epoch)[at]) for epoch, at in places]


def further_indices(examples: int, chosen: Sequence[int], seed: int, step: int) -> list[int]:
    """Returns the other examples in the order in which they replace some of a step's ``chosen``."""
    order = np.random.default_rng([seed, step, 1]).permutation(examples)
    return order[~np.isin(order, chosen)].tolist()


@functools.lru_cache(maxsize=64)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
