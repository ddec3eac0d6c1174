"""A fleet: several engines over one base behind one address, on Ray; see docs/fleet.md.

Command: python -m mint_jax.launch --config=configs/fleet.py --config.engines=4
  --workdir=runs/fleet
Short: --config=configs/fleet.py:ci
"""

from ml_collections import ConfigDict
from serve import get_config as serve


def get_config(size: str = "default") -> ConfigDict:
    """``size``: as of ``configs/serve.py``."""
    config = serve(size)
    config.job = "fleet"
    config.engines = 2
    return config
