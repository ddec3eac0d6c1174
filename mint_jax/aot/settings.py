"""Settings of ``scale_up``, and shapes that a base is compiled for. Imports no JAX."""

import dataclasses
from typing import Any

from mint_jax.aot import chips
from mint_jax.fields import setting
from mint_jax.harness.options import REMAT, Dtype, MeshSizes, Quantised, RecipeSettings
from mint_jax.lora.config import AdapterConfig
from mint_jax.models.kernels import Kernels


@dataclasses.dataclass(frozen=True)
class TrainShape:
    """Shape of one ``forward_backward``."""

    policies: int = setting("P, number of policies")
    rows: int = setting("B, rows of each policy")
    tokens: int = setting("T, tokens of a row")
    targets: int = setting("M, largest number of target tokens of a row")
    remat: str = setting(REMAT, "full")


@dataclasses.dataclass(frozen=True)
class RolloutShape:
    """Shape of a pool that holds all rollouts at full length, and of its programs."""

    adapters: int = setting("N, number of resident adapters; rows name theirs at run time")
    prompts: int = setting("Q, number of prompts")
    rollouts: int = setting(
        "G, rollouts of a prompt, which share its pages; Q G rows decode together"
    )
    prompt_tokens: int = setting("S, tokens of a prompt")
    new_tokens: int = setting("C, largest number of new tokens of a rollout")
    blocks: int = setting(
        "least number of 32-token blocks that one prefill reads, the same in each part of the mesh",
        16,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleUpSettings(RecipeSettings):
    """Settings of a compilation for a pod."""

    base: str = setting("name of the model in the report")
    dtype: Dtype = setting("type of the base", "bfloat16")
    topology: str = setting("pod, such as v5p:2x2x1 or v5p-8; smallest: the smallest that fits")
    chip: str = setting("chip whose pods smallest tries", "v5p")
    mesh: MeshSizes = setting("division of the devices", MeshSizes())
    kernels: Kernels = setting("implementation of each kernel", Kernels())
    margin: float = setting("share of each device's memory to keep free", 0.05)
    hlo: bool = setting("write the compiled programs to the workdir", False)
    quantise: Quantised = setting("type of the layers' matrices; empty: dtype", "")
    adapter: AdapterConfig = setting("adapter of every policy")
    train: TrainShape = setting("the training step")
    rollout: RolloutShape = setting("sampling")
    model: dict[str, Any] = setting("fields of the model's config.json")

    folder = "aot"

    def preflight(self) -> None:
        if self.topology == "smallest":
            chips.names(self.chip)
        else:
            chips.canonical(self.topology)
        chips.need_compiler(self.chip if self.topology == "smallest" else self.topology)
