"""Four GRPO policies learn four tasks at once over one resident SmolLM2-135M-Instruct.

Command: python -m mint_jax.launch --config=configs/quickstart.py --workdir=runs/quickstart (or
  make quickstart)
Short: --config=configs/quickstart.py:ci
Hardware: two CPU cores, 4 GB of memory.
"""

from ml_collections import ConfigDict


def _policy(
    env: str,
    rank: int,
    learning_rate: float,
    kl: float,
    max_tokens: int,
    stop: tuple[str, ...] = (),
) -> ConfigDict:
    return ConfigDict(
        {
            "env": {"name": env},
            "adapter": {"rank": rank, "alpha": 2.0 * rank},
            "optimizer": {"learning_rate": learning_rate, "warmup_steps": 2, "max_grad_norm": 1.0},
            "loss": {"kind": "ppo", "kl_kind": "k3", "kl": kl},
            "sampling": {"prompts": 4, "group_size": 8, "max_tokens": max_tokens, "stop": stop},
        }
    )


def get_config(size: str = "default") -> ConfigDict:
    """``size``: ``default``, or ``ci`` for a run of about a minute."""
    config = ConfigDict()
    config.job = "grpo"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.seed = 0
    config.steps = 24
    config.schedule = "batched"
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 8
    config.checkpoint = ConfigDict({"every": 8, "keep": 2})
    config.eval = ConfigDict({"examples": 24, "samples": 4})
    config.policies = ConfigDict(
        {
            # At a rate of 5e-4 one seed of three lost its entropy in four steps and stayed where it
            # was: 0.48, the others 0.93 and 1.00; so 0.96 to 1.00.
            "adder": _policy("digit_sum", 16, 3e-4, 0.05, 6, ("\n",)),
            "larger": _policy("larger_of_two", 8, 5e-4, 0.01, 6, ("\n",)),
            "copier": _policy("copy_word", 4, 5e-4, 0.005, 8),
            "bracket": _policy("bracket_word", 32, 3e-4, 0.005, 8, ("\n",)),
        }
    )
    if size == "ci":
        config.steps = 3
        config.export_every = 2
        config.checkpoint.every = 2
        config.eval.examples = 6
        for name in config.policies:
            config.policies[name].sampling.prompts = 2
            config.policies[name].sampling.group_size = 4
    elif size != "default":
        raise ValueError(f"quickstart size {size!r}; expected default or ci")
    return config
