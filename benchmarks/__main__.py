"""``python -m benchmarks``: see ``benchmarks.launch``."""

from benchmarks.launch import main
from mint_jax import launch

if __name__ == "__main__":
    launch.cli(main)
