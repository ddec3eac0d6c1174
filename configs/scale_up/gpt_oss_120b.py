"""gpt-oss-120b, 128 experts and windows of 128, with 16 policies of rank 16 on four TPU v5p chips.

Command: python -m mint_jax.launch --config=configs/scale_up/gpt_oss_120b.py
  --workdir=runs/scale_up/gpt_oss_120b
Smallest pod: --config.topology=smallest --config.chip=v5p
Needs the ``tpu-aot`` extra and no accelerator; 6 minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from configs.scale_up import gpt_oss_20b
from mint_jax.models.names import SHAPES


def get_config() -> ConfigDict:
    config = gpt_oss_20b.get_config()
    config.base, config.topology = "gpt-oss-120b", "v5p:2x2x1"
    config.model = ConfigDict(SHAPES[config.base])
    return config
