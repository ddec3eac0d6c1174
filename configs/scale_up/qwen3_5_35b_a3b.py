"""Qwen3.5-35B-A3B, layers with a state or keys and 256 experts in each, with 16 policies of rank 16
on 16 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/qwen3_5_35b_a3b.py
  --workdir=runs/scale_up/qwen3_5_35b_a3b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Not compiled yet: whether it fits is not known.
"""

from ml_collections import ConfigDict

from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.job = "scale_up"
    config.base = "qwen3.5-35b-a3b"
    config.dtype = "bfloat16"
    config.topology = "v5p:2x2x4"  # or smallest
    config.chip = "v5p"  # whose pods smallest tries
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "expert": -1, "tensor": 2})
    config.margin = 0.05  # of the memory of each device, to stay free
    config.hlo = False  # write the compiled programs beside the result
    config.adapter = ConfigDict({"rank": 16, "alpha": 32.0, "targets": ("all-linear",)})
    config.train = ConfigDict(
        {"policies": 16, "rows": 1, "tokens": 4096, "targets": 2048, "remat": "full"}
    )
    config.rollout = ConfigDict(
        {"adapters": 16, "prompts": 64, "rollouts": 8, "prompt_tokens": 2048, "new_tokens": 2048}
    )
    config.model = ConfigDict(SHAPES[config.base])
    return config
