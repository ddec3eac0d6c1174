"""gpt-oss-20b, 32 experts and windows of 128, with 16 policies of rank 16 on eight TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gpt_oss_20b.py
  --workdir=runs/scale_up/gpt_oss_20b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; several minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "gpt-oss-20b"
    config.dtype = "bfloat16"
    config.topology = "v5p:2x2x2"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 1})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("q", "k", "v", "o")})
    config.train = ConfigDict(
        {"policies": 16, "rows": 2, "tokens": 2048, "targets": 1024, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 32, "rollouts": 8, "prompt_tokens": 1024, "new_tokens": 1024}
    )
    config.model = ConfigDict(SHAPES[config.base])
    return config
