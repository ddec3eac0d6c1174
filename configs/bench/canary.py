"""Judges of a canary on the same streams of real rewards: false rollbacks with a look at every
request, and answers of a bad revision before it is rolled back.

Command: python -m benchmarks --config=configs/bench/canary.py:cpu --workdir=runs/bench/canary
Default size (:cpu): about 20 minutes on two CPU cores. Short: --config=configs/bench/canary.py:ci
"""

from ml_collections import ConfigDict


def get_config(size: str = "cpu") -> ConfigDict:
    if (tiny := size == "ci") == (size in ("cpu", "default")):
        raise ValueError(f"canary size {size!r}; expected cpu or ci")
    config = ConfigDict({"bench": "canary", "dtype": "float32", "seed": 0})
    config.base, config.n = ("tiny-random", 4) if tiny else ("smollm2-135m-instruct", 60)
    # training: of a good policy, and of one with its rate times `collapse`
    # `older`: the step of the planted old revision
    config.steps, config.older = (2, 1) if tiny else (24, 3)
    config.rate, config.collapse, config.rank, config.alpha = 3e-4, 30.0, 4, 32.0
    config.layer_scale = 1.05  # of one layer of the planted revision
    config.env = ConfigDict({"name": "digit_sum"})
    config.sampling = ConfigDict({"prompts": 4, "group_size": 8, "max_tokens": 6, "stop": ("\n",)})
    config.examples, config.samples, config.slots = (2, 1, 4) if tiny else (24, 16, 14)
    # streams
    config.requests, config.share, config.margin = (200 if tiny else 3000), 0.1, 0.05
    config.level = 0.05  # of every judge's errors
    # answers of the candidate after which a gate compares the means, and the choices of two others
    config.gate, config.gates = 20, (40, 60, 80, 120, 160, 240)
    config.margins = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
    config.tau = 0.1  # of mSPRT's mixture, in units of the reward
    return config
