"""GRPO with LoRA on routed experts and latent attention: two policies over the tiny sparse base of
configs/bench/pretrain.py.

Command: python -m mint_jax.launch --config=configs/tiny/grpo_moe.py --workdir=runs/tiny/grpo_moe
The experts that the sampler visited are replayed in training. To study it:
--config.router_noise=0.3 gives the trainer routers whose weights differ from the sampler's,
--config.dtype=bfloat16 --config.trainer_dtype=float32 gives the two different arithmetic, and
'--config.policies.*.sampling.replay=False' trains on the trainer's own choice of experts. About two
minutes on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "grpo"
    config.base = "runs/bench/pretrain/base"
    config.dtype = "float32"
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": 1, "tensor": 1})
    config.seed = 0
    config.steps = 30
    config.schedule = "batched"
    config.reward_workers = 2
    config.max_tokens_per_pass = 65536
    config.max_rows = 512
    config.catalog = ""  # a folder or a database URL; WORKDIR/catalog by default
    config.export_every = 10
    config.checkpoint = ConfigDict({"every": 10, "keep": 2})
    config.eval = ConfigDict({"examples": 30, "samples": 4})
    config.tensorboard = False
    config.policies = ConfigDict()
    for name, targets, rank in (
        ("experts", ("gate", "up", "down"), 4),
        ("everything", ("all-linear",), 8),
    ):
        config.policies[name] = ConfigDict(
            {
                "env": {"name": "larger_of_two"},
                "adapter": {"rank": rank, "alpha": 2.0 * rank, "targets": targets},
                "optimizer": {"learning_rate": 2e-3, "max_grad_norm": 0.5},
                "loss": {"kind": "ppo"},
                "sampling": {"prompts": 16, "group_size": 8, "max_tokens": 4, "stop": ("\n",)},
            }
        )
    return config
