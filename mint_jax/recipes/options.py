"""Settings of each recipe, as frozen dataclasses. Imports no JAX; see ``harness.options``."""

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mint_jax.aot.settings import ScaleUpSettings
from mint_jax.envs import scoring
from mint_jax.errors import UserError, choice
from mint_jax.fields import Amount, Count, Natural, Open, Place, setting
from mint_jax.harness import settings
from mint_jax.harness.options import (
    BatchSettings,
    Dtype,
    EnvSettings,
    MeshSizes,
    PolicySettings,
    Quantised,
    RecipeSettings,
    SamplerSettings,
    TrainingSettings,
    check_data,
    check_environment,
    need_package,
)
from mint_jax.models import names
from mint_jax.rollout.ranges import check_ranges
from mint_jax.train import advantages
from mint_jax.train.config import KINDS, LossConfig

Shapes = tuple[tuple[int, ...], ...]
SERVICE_PACKAGES = "starlette pydantic jwt uvicorn google.protobuf zstandard pyrage"
MIN_P = "drop tokens less likely than this share of the likeliest; 0: none"
REWARD_TIMEOUT = "seconds that the reward of one completion may take; 0: no limit"


@dataclasses.dataclass(frozen=True)
class GrpoSampling:
    """Drawing of rollouts, and their way into a batch."""

    # No filters: a filter's support moves with the policy, so the gradient of what it draws is not
    # that of the renormalised probabilities.
    prompts: Count = setting("prompts of a step", 8)
    group_size: Count = setting("rollouts of a prompt", 8)
    max_tokens: Count = setting("largest number of new tokens", 16)
    temperature: float = setting("above 0, of the distribution that is sampled", 1.0)
    stop: tuple[str, ...] = setting("strings that end a completion", ())
    baseline: str = setting("group_mean (GRPO), leave_one_out (RLOO) or none", "group_mean")
    divide_by_std: bool | None = setting("divide by the rewards' std; unset: as in its paper", None)
    normalisation: str = setting("weight of a token: token, sequence, constant or sum", "token")
    updates: Count = setting("optimizer updates on the same rollouts", 1)
    replay: bool = setting("train through the experts that the sampler used (R3)", True)

    def __post_init__(self):
        # both refuse an unknown name
        advantages.group_advantages(np.zeros((1, self.group_size)), self.baseline)
        advantages.token_weights([1], self.normalisation)
        if not 1e-30 <= self.temperature <= 1e30:
            raise UserError(
                f"temperature is {self.temperature}; rollouts that train are drawn: set a number"
                " above 0, 1e-30 to 1e30 (0 is greedy, and has no gradient)"
            )

    @property
    def drawing(self) -> dict[str, Any]:
        """Settings that decide how tokens are drawn, as a revision records them."""
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "stop")}


@dataclasses.dataclass(frozen=True)
class DrawingSettings:
    """Drawing of completions; unset: as the revision was trained."""

    max_tokens: Count | None = setting("largest number of new tokens", None)
    temperature: float | None = setting("0 is greedy", None)
    top_k: int | None = setting("keep this many likeliest tokens; 0: all", None)
    top_p: float | None = setting("keep this much probability; 1: all", None)
    min_p: float | None = setting(MIN_P, None)
    stop: tuple[str, ...] | None = setting("strings that end a completion", None)

    def __post_init__(self):
        check_ranges(types.SimpleNamespace(**self.given))

    @property
    def given(self) -> dict[str, Any]:
        """Settings that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoPolicy(PolicySettings):
    """A policy of GRPO."""

    env: EnvSettings = setting("environment: prompts and rewards")
    sampling: GrpoSampling = setting("rollouts and advantages", GrpoSampling())
    rollout_revision: Place = setting("adapter that draws rollouts; empty: the policy", "")

    def __post_init__(self):
        if "advantages" not in self.loss.needs:
            raise UserError(
                f"loss.kind is {self.loss.kind!r}, which does not use rewards: choose ppo, say, or"
                " job sft or dpo"
            )


@dataclasses.dataclass(frozen=True)
class HeldOutSettings:
    """Evaluation before and after training."""

    examples: Count = setting("largest number of held-out prompts", 24)
    samples: Count = setting("completions of a prompt", 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoSettings(TrainingSettings, SamplerSettings):
    """Settings of GRPO."""

    schedule: str = setting("sequential, overlapped or batched sharing of the devices", "batched")
    cohorts: Count = setting("groups of policies that take turns, with schedule batched", 1)
    reward_workers: Count = setting("threads that compute rewards", 4)
    reward_timeout: Amount = setting(REWARD_TIMEOUT, scoring.TIMEOUT_S)
    max_rows: Count = setting("rows sampled together", 256)
    keep_rollouts: Natural = setting("last steps whose rollouts the catalog keeps; 0: none", 8)
    eval: HeldOutSettings = setting("evaluation before and after training", HeldOutSettings())
    router_noise: Amount = setting("std of noise on the trainer's router weights; 0: none", 0.0)
    trainer_dtype: str = setting("dtype of a second base for the trainer; empty: one base", "")
    trainer_quantise: str | None = setting("its 8-bit type, or empty; unset: the sampler's", None)
    policies: dict[str, GrpoPolicy] = setting("policies by name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Open):
    """Examples of SFT or DPO: a file, or an environment, whose options are further settings."""

    path: Place = setting("file that data.sources reads, .jsonl or .parquet for instance", "")
    held_out: Natural | None = setting("first rows to measure on only; unset: a tenth", None)
    env: str = setting("without a path: a name in envs.env.REGISTRY, or module:factory", "")
    append_eos: bool = setting("end plain texts and their replies with the end token", True)
    max_tokens: Natural = setting("largest row, prompt and answer; 0: the base's context", 0)
    too_long: Annotated[str, ("refuse", "cut", "drop")] = setting("fate of longer rows", "refuse")

    def __post_init__(self):
        if not self.path and not self.env:
            raise UserError(
                "there is neither path nor env; expected path (a .jsonl or .parquet file) or env"
                " (an environment's name)"
            )
        if self.extra and not self.env:
            raise UserError(
                f"{next(iter(self.extra))} is no setting of a file: drop it, or name an environment"
            )

    def preflight(self, where: str) -> None:
        if self.path:
            check_data(f"{where}.path", self.path)
        else:
            check_environment(where, self.env, self.extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftPolicy(PolicySettings):
    """A policy of SFT. It also takes registered losses of log-probabilities alone."""

    data: DataSettings = setting("examples")
    batch_size: Count = setting("examples of an update", 8)
    loss: LossConfig = setting("cross-entropy, with kl if set", LossConfig(kind="cross_entropy"))

    def __post_init__(self):
        kind = type(self).__dataclass_fields__["loss"].default.kind
        is_own = kind == "cross_entropy" and self.loss.kind not in KINDS
        if self.loss.kind != kind and not (is_own and self.loss.needs <= {"ref_logp"}):
            raise UserError(
                f"loss.kind is {self.loss.kind!r}, but this job minimises {kind!r}: drop"
                " loss.kind, or choose another job"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftSettings(TrainingSettings):
    """Settings of SFT."""

    policies: dict[str, SftPolicy] = setting("policies by name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoPolicy(SftPolicy):
    """A policy of DPO."""

    loss: LossConfig = setting("the loss of pairs", LossConfig(kind="dpo"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoSettings(TrainingSettings):
    """Settings of DPO."""

    policies: dict[str, DpoPolicy] = setting("policies by name")


@dataclasses.dataclass(frozen=True)
class LineSampling:
    """Sampling of one line of an input file."""

    max_tokens: Count = setting("largest number of new tokens", 64)
    temperature: float = setting("0 is greedy", 1.0)
    top_k: Natural = setting("keep this many likeliest tokens; 0: all", 0)
    top_p: float = setting("keep this much probability; 1: all", 1.0)
    min_p: float = setting(MIN_P, 0.0)
    repetition_penalty: float = setting("divides positive logits of earlier tokens; 1: none", 1.0)
    frequency_penalty: float = setting("subtracted for each occurrence in the completion", 0.0)
    presence_penalty: float = setting("subtracted once for tokens that the completion has", 0.0)
    ignore_eos: bool = setting("go on after the checkpoint's end tokens", False)
    top_logprobs: Natural = setting("likeliest tokens written for each position", 0)
    prompt_logprobs: bool = setting("write the log-probabilities of the prompt's tokens", False)
    top_prompt_logprobs: Natural = setting("top_logprobs for each position of the prompt", 0)
    prompt_alternatives: Natural = setting("tokens drawn at each position of the prompt", 0)
    json_schema: str = setting("schema of the completion as JSON; a line may give an object", "")
    regex: str = setting("regular expression that the whole completion matches", "")
    choice: tuple[str, ...] = setting("the completion is one of these texts", ())
    seed: int = setting("the same seed gives the same tokens in any batch", 0)
    n: Count = setting("completions of a line", 1)
    stop: tuple[str, ...] = setting("strings that end a completion", ())
    stop_ids: tuple[int, ...] = setting("token ids that end it, besides end tokens", ())

    def __post_init__(self):
        check_ranges(self, "sampling.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleSettings(BatchSettings, SamplerSettings):
    """Settings of sampling."""

    sampling: LineSampling = setting("of lines without settings of their own", LineSampling())


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSettings(BatchSettings):
    """Settings of scoring."""

    max_tokens: Count = setting("tokens of a batch, with padding", 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateSettings(SamplerSettings):
    """Settings of an evaluation."""

    env: EnvSettings = setting("environment: held-out examples and rewards")
    seed: Natural = setting("the same seed draws the same completions", 0)
    examples: Count = setting("largest number of held-out examples", 30)
    samples: Count = setting("completions of an example", 4)
    adapters: dict[str, Place] = setting("revision or PEFT directory by label; empty: the base")
    sampling: DrawingSettings = setting("how completions are drawn", DrawingSettings())
    slots: Count = setting("adapters of one batch, and on the device at once", 64)
    reward_timeout: Amount = setting(REWARD_TIMEOUT, scoring.TIMEOUT_S)

    def preflight(self) -> None:
        super().preflight()
        self.env.preflight("env")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(SamplerSettings):
    """Settings of the service."""

    host: str = setting("address; beyond loopback it needs keys, and TLS", "127.0.0.1")
    port: Natural = setting("0: any free port", 8000)
    name: str = setting("clients' name of the base; empty: the setting base", "")
    tokenizer: Place = setting("hub name or folder for Tinker clients; empty: the base's name", "")
    peft_folder: Place = setting("folder that /v1/load_lora_adapter may read; empty: none", "")
    api_keys: Place = setting("folder of mint_jax.service.keys; empty: no keys, loopback only", "")
    hosts: tuple[str, ...] = setting("further Host headers that a server without keys takes", ())
    certificate: Place = setting("TLS certificate with its chain; empty: no TLS", "")
    private_key: Place = setting("key of the certificate, where its file has none", "")
    behind_tls: bool = setting("a proxy in front of the server encrypts", False)
    ranks: tuple[int, ...] = setting("powers of two; a policy gets the next larger one", (32,))
    slots: Count = setting("policies in training on the device, for each of ranks", 4)
    adapters: Count = setting("revisions for sampling on the device, for each of ranks", 16)
    shapes: Shapes = setting("blocks, rows, tokens and targets of each step; empty: by device", ())
    max_rows: Count = setting("rows sampled together", 32)
    reuse_decoded: bool = setting("reuse a chat's sampled tokens; rounding may differ", False)
    host_gib: Amount = setting("host memory for idle policies, and again for adapters, GiB", 4.0)
    gap_s: Amount = setting("seconds that decoding rows wait for a training step at most", 0.5)
    idle_gap_s: Amount = setting("the same while no row decodes", 2.0)
    precompile: Annotated[str, ("background", "before", "only")] = setting(
        "while serving; before it; into the cache only, then exit", "background"
    )
    snapshot_every: Count = setting("updates of a policy between two snapshots of its state", 16)
    snapshot_s: Amount = setting("seconds after which a snapshot is taken anyway", 60.0)
    session_s: Amount = setting("seconds without a request that end a client's session", 86400.0)
    openai_limits: bool = setting("refuse what OpenAI's API refuses beyond the engine", True)
    body_mb: Count = setting("largest request body, MB; 1 MB on paths that take no data", 64)
    bodies_gib: Amount = setting("memory for all request bodies, GiB; beyond it 429", 1.0)
    tenant_requests: Count = setting("requests of a tenant in flight; further ones get 429", 1000)
    tenant_tokens: Natural = setting("tokens of a tenant's requests in flight; 0: no limit", 0)
    tenant_policies: Natural = setting("policies of a tenant in training; 0: no limit", 0)
    tenant_gib: Amount = setting("checkpoints and states of a tenant, GiB; 0: no limit", 0.0)

    def __post_init__(self):
        for shape in self.shapes:
            if len(shape) not in (3, 4) or min(shape) < 1:
                raise UserError(
                    f"shapes has {shape!r}; expected blocks, rows and tokens of a step, and targets"
                    " a position, as in (4, 1, 1024)"
                )
        if not self.ranks:
            raise UserError("ranks is empty; expected the ranks that policies may have: (8, 32)")

    creates_catalog = needs_one_process = True

    def preflight(self) -> None:
        super().preflight()
        for module in SERVICE_PACKAGES.split():
            need_package(module, "serve", "the service")
        for name, kind, exists in (
            ("peft_folder", "folder", Path.is_dir),
            ("certificate", "file", Path.is_file),
            ("private_key", "file", Path.is_file),
        ):
            if (place := getattr(self, name)) and not exists(Path(place)):
                raise UserError(
                    f"{name} is {place!r}; expected a {kind} that exists: set --config.{name}, or"
                    " leave it empty"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertSettings(RecipeSettings):
    """Settings of a conversion."""

    base: Place = setting("checkpoint directory, hub name, or name of a packaged base")
    output: Place = setting("new directory, the base of later jobs; empty: WORKDIR/base", "")
    dtype: Dtype = setting("storage and compute type of later jobs", "bfloat16")
    quantise: Quantised = setting("type of the layers' matrices; empty: dtype", "")
    mesh: MeshSizes = setting("division of the devices of later jobs", MeshSizes(data=1))
    needs_one_process = True

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size. Copies of the base do not matter."""
        return vars(self.mesh) | {"data": 1}

    def preflight(self) -> None:
        names.check(self.base)
        if min(self.sizes.values()) < 1:
            raise UserError(
                f"mesh is {self.sizes}; expected the size of every axis of the later jobs' mesh, at"
                " least 1: the devices need not be here, so that none can be counted"
            )


OF_JOB: dict[str, type[RecipeSettings]] = {
    "grpo": GrpoSettings,
    "sft": SftSettings,
    "dpo": DpoSettings,
    "evaluate": EvaluateSettings,
    "sample": SampleSettings,
    "score": ScoreSettings,
    "serve": ServeSettings,
    "convert": ConvertSettings,
    "scale_up": ScaleUpSettings,
}


def of_job(job: Any) -> type[RecipeSettings]:
    """Returns the class of a job's settings."""
    if job not in OF_JOB:
        raise choice("job", job, OF_JOB)
    return OF_JOB[job]


def read(config: Mapping[str, Any]) -> Any:
    """Returns the settings of a config, which names its ``job``; see ``settings.build``."""
    tree = config.to_dict() if hasattr(config, "to_dict") else dict(config)  # type: ignore[attr-defined]
    return settings.build(of_job(tree.get("job")), tree)
