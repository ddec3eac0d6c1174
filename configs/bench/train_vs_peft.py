"""One step over four policies, and a mixed batch of four adapters, against torch + transformers +
PEFT.

Command: python -m benchmarks --config=configs/bench/train_vs_peft.py
  --workdir=runs/bench/train_vs_peft
Short: --config=configs/bench/train_vs_peft.py:ci
Long: --config=configs/bench/train_vs_peft.py:long (torch.compile is tried for the peer too, up to
  a quarter of an hour, and, where it is faster, again for each adapter: the whole did not end
  within 40 minutes)
Needs the ``bench`` extra.
Default size: five minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    config = ConfigDict()
    config.bench = "train_vs_peft"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.n = 5
    config.policies = 4
    config.rows = 2
    config.tokens = 128
    config.rank = 8
    config.sample_rows = 8
    config.sample_prompt = 32
    config.sample_tokens = 32
    config.trial_tokens = 8  # while the peer's options are tried
    # that torch.compile may take for everything the peer does; at 0 it is not tried
    config.compile_s = 0.0
    if size == "ci":
        config.base = "tiny-random"
        config.n = 2
        config.policies = 2
        config.tokens = 16
        config.sample_rows = 4
        config.sample_prompt = 8
        config.sample_tokens = config.trial_tokens = 4
        config.compile_s = 1.0
    elif size == "long":
        config.compile_s = 900.0
    elif size != "default":
        raise ValueError(f"train_vs_peft size {size!r}; expected default, ci or long")
    return config
