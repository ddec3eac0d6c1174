"""Settings that several recipes share. ``preflight`` checks the bases, files, folders and packages
that they name before JAX is imported or anything is written; what needs the base, the devices or
the rows of a file is checked by the recipe. Imports no JAX.
"""

import contextlib
import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated, Any

from mint_jax.envs import env as env_lib
from mint_jax.errors import UserError
from mint_jax.fields import Amount, Count, Natural, Open, Place, setting
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import names
from mint_jax.models.kernels import Kernels
from mint_jax.train.config import LossConfig, OptimizerConfig

TRACKERS = ("wandb", "mlflow")  # the setting, the package and the extra have the same name
Dtype = Annotated[str, tuple(names.DTYPES)]
Quantised = Annotated[str, ("", *names.QUANTISED)]
ROW_FILES = (".parquet", ".arrow")  # need pyarrow


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Settings of every recipe."""

    job: str = setting("recipe to run")

    folder = "recipes"  # of mint_jax; its module of the job's name has run(settings, workdir)
    needs_one_process = False

    def preflight(self) -> None:
        """Raises ``UserError`` for the first thing that the settings name and that is missing."""


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """Sizes of the mesh axes; one of them may be -1, which takes the remaining devices."""

    data: int = setting("copies of the base; each takes a part of the rows", -1)
    fsdp: int = setting("parts of the base's width, and of the rows", 1)
    expert: int = setting("parts of the rows, and of routed experts", 1)
    tensor: int = setting("parts of heads, ffw and vocabulary", 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseSettings(RecipeSettings):
    """Settings of every recipe over a base."""

    base: Place = setting("checkpoint directory, hub name, or name of a packaged base")
    dtype: Dtype = setting("storage and compute type of the base", "float32")
    quantise: Quantised = setting("type of the layers' matrices; empty: dtype", "")
    as_stored: bool = setting("on one CPU, keep weights in the checkpoint's own format", True)
    mesh: MeshSizes = setting("division of the devices", MeshSizes())
    kernels: Kernels = setting("implementation of each kernel", Kernels())

    def preflight(self) -> None:
        names.check(self.base)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogSettings(BaseSettings):
    """Settings of recipes over a base and a catalog."""

    catalog: Place = setting("folder or database URL; empty: training makes WORKDIR/catalog", "")
    payloads: Place = setting("folder, s3:// or gs://; empty: inside the catalog's folder", "")

    creates_catalog = False  # a missing one

    def preflight(self) -> None:
        super().preflight()
        if self.catalog.startswith(("postgres://", "postgresql")):
            need_package("psycopg", "postgres", "a catalog in PostgreSQL")
        if self.catalog and not self.creates_catalog:
            need_catalog(self.catalog)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerSettings(CatalogSettings):
    """Settings of recipes that sample."""

    max_rows: Count = setting("rows sampled together", 64)
    cache_gib: Amount = setting(
        "largest cache of the sampler, GiB; 0: 1 GiB on a CPU, most free memory elsewhere", 0.0
    )

    @property
    def cache_bytes(self) -> int | None:
        """Largest cache; None: the engine decides."""
        return int(self.cache_gib * 2**30) or None


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints of a training run."""

    every: Count = setting("steps between two checkpoints", 10)
    keep: Count = setting("number of checkpoints kept", 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of a policy in training."""

    adapter: AdapterConfig = setting("shape and scale of the adapter")
    optimizer: OptimizerConfig = setting("AdamW and its schedule", OptimizerConfig())
    loss: LossConfig = setting("the loss", LossConfig())
    seed: Natural | None = setting("unset: from the run's seed and the policy's name", None)
    rollout_revision = ""  # GRPO policies may draw from another revision


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(CatalogSettings):
    """Settings of grpo, sft and dpo."""

    seed: Natural = setting("seed of data order, adapters and sampling", 0)
    steps: Count = setting("updates of each policy")
    remat: str = setting("values kept for the backward pass, by models.transformer.REMAT", "names")
    max_tokens_per_pass: Count | None = setting(
        "tokens of one pass; unset: 16384 on CPUs, 8192 on accelerators", None
    )
    tenant: str = setting("owner of the policies in the catalog", "default")
    export_every: Count = setting("steps between two revisions, besides the last step's", 10)
    eval_every: Natural = setting("steps between two held-out evaluations; 0: none", 0)
    checkpoint: CheckpointSettings = setting("checkpoints of the run", CheckpointSettings())
    tensorboard: bool = setting("write metrics for TensorBoard too", True)
    wandb: str = setting("Weights & Biases project that gets the metrics; empty: none", "")
    mlflow: str = setting("MLflow experiment that gets the metrics; empty: none", "")
    policies: dict[str, PolicySettings] = setting("policies by name")

    keep_rollouts = 0  # GRPO has rollouts to keep
    creates_catalog = True

    @property
    def trackers(self) -> dict[str, str]:
        """Project or experiment by tracker; empty where a tracker is not used."""
        return {name: getattr(self, name) for name in TRACKERS}

    def preflight(self) -> None:
        super().preflight()
        for name, where in self.trackers.items():
            if where:
                need_package(name, name, f"{name}={where!r}")
        for name, policy in self.policies.items():
            for part in ("env", "data"):
                if hasattr(policy, part):
                    getattr(policy, part).preflight(f"policies.{name}.{part}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSettings(Open):
    """An environment; further settings are its own options."""

    name: str = setting("a name in envs.env.REGISTRY, or module:factory")

    def make(self) -> env_lib.Environment:
        return env_lib.make(self.name, **self.extra)

    def preflight(self, where: str) -> None:
        check_environment(where, self.name, self.extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings(CatalogSettings):
    """Settings of recipes that read and write JSONL files."""

    input: Place = setting("JSONL file to read", "")
    output: Place = setting("JSONL file to write", "")
    slots: Count = setting("adapters of each rank bucket on the device; others take turns", 64)

    def preflight(self) -> None:
        super().preflight()
        for name in ("input", "output"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty: set --config.{name}=FILE.jsonl")
        check_data("input", self.input)


def need_package(module: str, extra: str, what: str) -> None:
    """Refuses a feature whose optional package is not installed; nothing is imported."""
    found = None
    with contextlib.suppress(ModuleNotFoundError):  # a parent package is missing
        found = importlib.util.find_spec(module)
    if found is None:
        raise UserError(
            f"{what} needs the package {module}, which is not installed: pip install"
            f" 'mint-jax[{extra}]'"
        )


def need_catalog(place: str) -> None:
    """Refuses a catalog folder that does not exist; databases are asked when they are opened."""
    if "://" not in place and not (Path(place) / "catalog.db").is_file():
        raise UserError(
            f"catalog {place} does not exist: set --config.catalog to a catalog's folder or its"
            " database's URL"
        )


def check_environment(where: str, name: str, options: dict[str, Any]) -> None:
    """Checks that an environment can be imported, takes these options, and has its data file."""
    env_lib.check_options(name, **options)
    if name == "jsonl":
        check_data(f"{where}.path", options["path"])


def check_data(where: str, path: str) -> None:
    """Checks that a data file exists, and that its reader is installed."""
    if not Path(path).is_file():
        raise UserError(f"{where}: data file {path} does not exist: set --config.{where}")
    if path.endswith(ROW_FILES):
        need_package("pyarrow", "data", f"reading {path}")
