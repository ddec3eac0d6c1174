"""Python API: a resident base, policies over it and a catalog, made of the objects that jobs use.

    import mint_jax as mint

    base = mint.load("smollm2-135m-instruct")
    policy = base.policy("adder", rank=8, learning_rate=1e-3)
    for _ in range(8):
        policy.train_step([{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "3 + 4 =",
        "completion": " 7"}])
    print(base.sample("3 + 5 ="), policy.sample("3 + 5 ="))
    with mint.open("runs/mine", create=True) as catalog:
        policy.save(catalog, why="first lesson")
        print(base.sample("3 + 5 =", catalog["adder@latest"]))

``Model`` and ``Policy`` are in ``model``, ``open`` in ``store``; this file runs jobs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from mint_jax import launch, recipes
from mint_jax import mesh as mesh_lib
from mint_jax.api.evaluation import Evaluation
from mint_jax.api.inputs import as_seed
from mint_jax.api.model import Model, Policy
from mint_jax.api.store import Store, Stored, open
from mint_jax.errors import UserError
from mint_jax.harness import start
from mint_jax.harness.options import RecipeSettings
from mint_jax.models import base as base_lib

__all__ = [
    "Evaluation",
    "Model",
    "Policy",
    "Store",
    "Stored",
    "config",
    "load",
    "open",
    "read_config",
    "run",
]


def load(
    name: str, dtype: str = "float32", quantise: str = "", mesh: Mesh | None = None, seed: int = 0
) -> Model:
    """Loads a base model onto all devices of this process, or onto those of ``mesh``.

    Args:
        name: a directory, a packaged base or a Hugging Face Hub name.
        dtype: storage and compute dtype: ``float32`` or ``bfloat16``.
        quantise: ``int8`` or ``float8`` stores the layers' matrices in 8 bits.
        seed: seeds of adapters and samples derive from it, so the same calls give the same tokens.

    Raises:
        UserError: the base does not exist or cannot be read.
    """
    if not isinstance(name, str | Path):
        raise UserError(f"base is {name!r}; expected a directory, a packaged base or a Hub name")
    seed = as_seed(seed)
    start.prepare()
    return Model(
        base_lib.load(str(name), mesh or mesh_lib.make_mesh(), dtype, quantise=quantise), seed
    )


def config(job: str, **values: Any) -> RecipeSettings:
    """Returns a job's config with the given values; every other setting has its default.

        mint.config("sft", base="smollm2-135m-instruct", steps=20,
                    policies={"adder": {"data": {"env": "digit_sum"}, "adapter": {"rank": 8}}})

    Raises:
        UserError: a job or setting is unknown, or a required setting is missing. See
            ``docs/settings.md``.
    """
    return recipes.read({"job": job, **values})


def read_config(name: str | Path, **changes: Any) -> RecipeSettings:
    """Reads a config file, ``FILE`` or ``FILE:ARGUMENT`` as for ``--config``, and applies changes.

        mint.read_config("configs/sft/smollm2.py", steps=3)

    Raises:
        UserError: the file does not exist or refuses its argument, a setting is unknown, or a value
            has the wrong type.
    """
    _, tree = launch.load(str(name))
    return recipes.read(_merged(tree, changes))


def _merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict with changes; sections keep their other settings."""
    return {**tree} | {
        name: _merged(tree[name], value)
        if isinstance(value, Mapping) and isinstance(tree.get(name), Mapping)
        else value
        for name, value in changes.items()
    }


def run(config: RecipeSettings, workdir: str | Path) -> dict[str, Any]:
    """Runs a job in this process, as ``python -m mint_jax.launch`` does.

    Returns:
        the job's result, also written to ``WORKDIR/result.json``.

    Raises:
        UserError: the config is not one, or the job refuses it.
    """
    if not isinstance(config, RecipeSettings):
        raise UserError(
            f"config is {config!r:.80}; expected a config from mint.config or mint.read_config"
        )
    config.preflight()
    start.prepare()
    return launch.run(config, Path(workdir))
