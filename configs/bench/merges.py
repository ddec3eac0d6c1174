"""Merges of policies of 24 languages: mean loss by the number of members, and a curve fitted to
three members at most that predicts it for more; sums, TIES and DARE over the same members.

Command: python -m benchmarks --config=configs/bench/merges.py:cpu --workdir=runs/bench/merges
Default size (:cpu): about 20 minutes on two CPU cores. Short: --config=configs/bench/merges.py:ci
"""

from ml_collections import ConfigDict

LANGUAGES = "en de fr es it pt nl sv da nb fi pl cs sk hu ro tr id vi hr sl et lt lv"


def get_config(size: str = "cpu") -> ConfigDict:
    if (tiny := size == "ci") == (size in ("cpu", "default")):
        raise ValueError(f"merges size {size!r}; expected cpu or ci")
    config = ConfigDict({"bench": "merges", "dtype": "float32", "seed": 0})
    config.base = "tiny-random" if tiny else "smollm2-135m-instruct"
    config.languages = tuple(LANGUAGES.split())[: 4 if tiny else 24]
    config.year, config.days = 1990, 18_262  # dates of 50 years
    # training
    config.steps, config.batch, config.rate = (2, 2, 1e-3) if tiny else (12, 6, 2e-3)
    config.rank, config.alpha = (1, 2.0) if tiny else (4, 8.0)
    # merges: numbers of members, and how many of each; those of `fit` determine the curve
    config.sizes = (1, 2, 3, 4) if tiny else (1, 2, 3, 8, 16, 24)
    config.draws = (4, 2, 2, 1) if tiny else (24, 96, 96, 24, 12, 1)
    config.fit, config.resamples = (1, 2, 3), 5 if tiny else 200
    config.compared = (4,) if tiny else (24,)  # sizes at which the other ways are tried
    config.factors = (2.0, 4.0)  # times the average
    config.densities = ConfigDict({"ties": 0.2, "dare": 0.5, "dare_ties": 0.5})
    # losses
    config.held_out, config.score_slots, config.score_tokens = (1, 4, 512) if tiny else (2, 4, 4096)
    return config
