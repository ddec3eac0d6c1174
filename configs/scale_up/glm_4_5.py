"""GLM-4.5, 160 experts behind three dense layers, with 16 policies of rank 16 on 32 TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/glm_4_5.py
  --workdir=runs/scale_up/glm_4_5
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator. Not compiled yet: whether it fits is not known.
"""

from ml_collections import ConfigDict

from configs.scale_up import qwen3_235b_a22b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = qwen3_235b_a22b.get_config()
    config.base = "glm-4.5"
    config.topology = "v5p:2x4x4"  # 160 experts do not divide over 64 devices
    config.train.rows = 2  # of 4,096 tokens
    config.model = ConfigDict(SHAPES[config.base])
    return config
