"""Routing: policies of 24 languages by three users each, and requests that do not name theirs.

Command: python -m benchmarks --config=configs/bench/routes.py:cpu --workdir=runs/bench/routes
Default size (:cpu): about 40 minutes on two CPU cores. Short: --config=configs/bench/routes.py:ci
Time of a decision alone, on an idle machine: --config=configs/bench/routes.py:time (2 minutes)
"""

from merges import LANGUAGES
from ml_collections import ConfigDict


def get_config(size: str = "cpu") -> ConfigDict:
    if (tiny := size == "ci") == (size in ("cpu", "default", "time")):
        raise ValueError(f"routes size {size!r}; expected cpu, time or ci")
    config = ConfigDict({"bench": "routes", "dtype": "float32", "seed": 0})
    config.base = "tiny-random" if tiny else "smollm2-135m-instruct"
    config.languages = tuple(LANGUAGES.split())[: 3 if tiny else 24]
    config.unseen = ("ru",) if tiny else ("ru", "el", "ja", "ko")  # no policy knows them
    config.copies = 2 if tiny else 3
    config.year, config.days = 1990, 18_262  # dates of 50 years
    # training
    config.steps, config.batch, config.rate = (2, 2, 1e-3) if tiny else (12, 6, 2e-3)
    config.together = 2 if tiny else 12  # policies of a step
    config.rank, config.alpha = (1, 2.0) if tiny else (4, 8.0)
    # rewards and vectors
    config.held_out, config.examples = (2, 2) if tiny else (4, 8)
    config.score_slots, config.score_tokens = (4, 512) if tiny else (4, 4096)
    config.distractors = 50 if tiny else 100_000
    # traffic: slots of one engine, MinT's published seconds of a load
    config.requests, config.n, config.zipf = (40, 2, 0.8) if tiny else (20_000, 5, 0.8)
    config.slots, config.load_s = 2 if tiny else 16, 1.36
    config.costs = (0.0, 0.1) if tiny else (0.0, 0.05, 0.1, 0.3)  # reward of a second
    # time
    config.records = (100,) if tiny else ()
    config.decisions = 20 if tiny else 2000
    if size == "time":
        config.languages, config.records = (), (1_000, 100_000, 1_000_000)
    return config
