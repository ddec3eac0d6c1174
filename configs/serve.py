"""The service: tenants train and sample over one base by Tinker's and OpenAI's clients; see
docs/service.md.

Command: python -m mint_jax.launch --config=configs/serve.py --config.base=smollm2-135m-instruct
  --config.port=8000 --workdir=runs/serve
Short: --config=configs/serve.py:ci
"""

from ml_collections import ConfigDict


def get_config(size: str = "default") -> ConfigDict:
    """``size``: ``default``, or ``ci`` for a base without meaning that is ready in seconds."""
    config = ConfigDict()
    config.job = "serve"
    config.base = "smollm2-135m-instruct"
    config.dtype = "float32"
    config.port = 8000
    if size == "ci":
        config.base = "tiny-random"
        config.port = 0
        config.ranks = (8,)
        config.slots = 2
        config.adapters = 2
        config.shapes = ((1, 1, 64), (4, 1, 64))
        config.max_rows = 8
    elif size != "default":
        raise ValueError(f"serve size {size!r}; expected default or ci")
    return config
