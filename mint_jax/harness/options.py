"""Settings of the recipes: groups that several share, then each recipe's own. ``preflight`` checks
the bases, files, folders and packages that they name before JAX is imported or anything is written;
what needs the base, the devices or the rows of a file is checked by the recipe. Imports no JAX.
"""

import contextlib
import dataclasses
import importlib.util
import types
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from mint_jax.envs import env as env_lib
from mint_jax.envs import judge, scoring
from mint_jax.errors import UserError
from mint_jax.fields import Amount, Count, Natural, Open, Place, setting
from mint_jax.lora.config import FORMS, INITS, AdapterConfig
from mint_jax.models import names
from mint_jax.models.kernels import Kernels
from mint_jax.rollout.ranges import check_ranges
from mint_jax.train import advantages
from mint_jax.train.config import KINDS, PAIRED, LossConfig, OptimizerConfig, check_dropout

TRACKERS = ("wandb", "mlflow")  # the setting, the package and the extra have the same name
Dtype = Annotated[str, tuple(names.DTYPES)]
Quantised = Annotated[str, ("", *names.QUANTISED)]
ROW_FILES = (".parquet", ".arrow")  # need pyarrow
Shapes = tuple[tuple[int, ...], ...]
SERVICE_PACKAGES = "starlette pydantic jwt uvicorn google.protobuf zstandard pyrage"
MIN_P = "drop tokens less likely than this share of the likeliest; 0: none"
REMAT = "recomputation in the backward pass: none, names (all but named activations) or full"
ENVIRONMENTS = f"{', '.join(env_lib.REGISTRY)}, or module:factory"
REWARD_TIMEOUT = "seconds that the reward of one completion may take; 0: no limit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Settings of every recipe."""

    job: str = setting("job to run")

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
    speculative_tokens: Natural = setting("drafts that idle rows verify in one step, 0 to 15", 0)
    cache_gib: Amount = setting("largest cache, GiB; 0: 1 GiB on a CPU, else most free memory", 0.0)

    @property
    def cache_bytes(self) -> int | None:
        """Largest cache; None: the engine decides."""
        return int(self.cache_gib * 2**30) or None

    @property
    def sampler(self) -> dict[str, Any]:
        """Arguments of the engine."""
        same = "max_rows", "speculative_tokens", "cache_bytes"
        return {name: getattr(self, name) for name in same}


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints of a training run."""

    every: Count = setting("steps between two checkpoints", 10)
    keep: Count = setting("number of checkpoints kept", 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Settings of a policy in training."""

    adapter: AdapterConfig = setting("shape and scale of the adapter")
    optimizer: OptimizerConfig = setting("the optimizer and its schedule", OptimizerConfig())
    loss: LossConfig = setting("the loss", LossConfig())
    seed: Natural | None = setting("unset: from the run's seed and the policy's name", None)
    init: Annotated[str, INITS] = setting(
        "A of a new adapter, whose B is zero: uniform as PEFT's, or orthonormal rows", "uniform"
    )
    dropout: float = setting("probability of dropping an adapter's input in training, below 1", 0.0)
    rollout_revision = ""  # GRPO policies may draw from another revision


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(CatalogSettings):
    """Settings of grpo, sft and dpo."""

    seed: Natural = setting("seed of data order, adapters and sampling", 0)
    steps: Count = setting("updates of each policy")
    remat: str = setting(REMAT, "names")
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
            check_dropout(policy.dropout, f"policies.{name}.")
            for part in ("env", "data"):
                if hasattr(policy, part):
                    getattr(policy, part).preflight(f"policies.{name}.{part}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSettings(Open):
    """An environment; further settings are its own options."""

    name: str = setting(ENVIRONMENTS)
    chat_template_kwargs: Open = setting("of the chat template, such as enable_thinking", Open())

    def make(self) -> env_lib.Environment:
        return env_lib.make(self.name, **self.extra)

    def preflight(self, where: str) -> None:
        check_environment(where, self.name, self.extra)
        if self.name == "judge":
            judge.check(self.extra)


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


@dataclasses.dataclass(frozen=True)
class GrpoSampling:
    """Drawing of rollouts, and their way into a batch."""

    # No filters: a filter's support moves with the policy, so the gradient of what it draws is not
    # that of the renormalised probabilities.
    prompts: Count = setting("prompts of a step", 8)
    group_size: Count = setting("rollouts of a prompt", 8)
    max_tokens: Count = setting("largest number of new tokens", 16)
    max_turns: Count = setting("largest number of turns of a conversation", 8)
    temperature: float = setting("above 0, of the distribution that is sampled", 1.0)
    stop: tuple[str, ...] = setting("strings that end a completion", ())
    baseline: str = setting("group_mean (GRPO), leave_one_out (RLOO) or none", "group_mean")
    divide_by_std: bool | None = setting("divide by the rewards' std; unset: as in its paper", None)
    normalisation: str = setting("weight of a token: token, sequence, constant or sum", "token")
    updates: Count = setting("optimizer updates on the same rollouts", 1)
    mask_truncated: bool = setting("no loss of completions cut off at max_tokens", False)
    overlong_tokens: Natural = setting(
        "last tokens of max_tokens over which the reward falls by 1; 0: none", 0
    )
    reward_weight: Amount = setting(
        "factor of the advantages; 0: only the KL to loss.reference teaches (distillation)", 1.0
    )
    resample: Natural = setting(
        "prompts of equal rewards are replaced by others, up to this many times prompts", 0
    )
    replay: bool = setting("train through the experts that the sampler used (R3)", True)

    def __post_init__(self):
        # both refuse an unknown name
        advantages.group_advantages(np.zeros((1, self.group_size)), self.baseline)
        advantages.token_weights([1], self.normalisation)
        if self.overlong_tokens > self.max_tokens:
            raise UserError(
                f"overlong_tokens is {self.overlong_tokens}; expected at most max_tokens, which is"
                f" {self.max_tokens}: lower it"
            )
        if self.resample and not self.reward_weight:
            raise UserError(
                f"resample is {self.resample}, but reward_weight is 0, so that prompts of equal"
                " rewards teach as much as others: drop resample"
            )
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
    max_turns: Count | None = setting("largest number of turns of a conversation", None)
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
        if not self.sampling.reward_weight and (self.loss.kl_kind == "none" or not self.loss.kl):
            raise UserError(
                "sampling.reward_weight is 0, and loss has no KL: nothing would be learned; set"
                " loss.kl_kind to k1, loss.kl, and loss.reference to the teacher's revision"
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
    max_staleness: Natural = setting(
        "updates that the weights of a rollout may lag behind; 0: none", 0
    )
    partial_rollouts: bool = setting(
        "with max_staleness: completions in parts, which go on under the weights of each update",
        False,
    )
    reward_workers: Count = setting("threads that compute rewards", 4)
    reward_timeout: Amount = setting(REWARD_TIMEOUT, scoring.TIMEOUT_S)
    reward_processes: Natural = setting(
        "processes that compute rewards; one that takes too long or dies costs its row; 0: none", 0
    )
    max_rows: Count = setting("rows sampled together", 256)
    keep_rollouts: Natural = setting("last steps whose rollouts the catalog keeps; 0: none", 8)
    eval: HeldOutSettings = setting("evaluation before and after training", HeldOutSettings())
    router_noise: Amount = setting("std of noise on the trainer's router weights; 0: none", 0.0)
    trainer_dtype: str = setting("dtype of a second base for the trainer; empty: one base", "")
    trainer_quantise: str | None = setting("its 8-bit type, or empty; unset: the sampler's", None)
    policies: dict[str, GrpoPolicy] = setting("policies by name")

    def __post_init__(self):
        for name, policy in self.policies.items():
            if self.max_staleness and "old_logp" not in policy.loss.needs:
                raise UserError(
                    f"max_staleness is {self.max_staleness}, but policies.{name}.loss.kind is"
                    f" {policy.loss.kind!r}, which does not correct for rollouts of older weights:"
                    " choose importance_sampling or ppo, say, or max_staleness 0"
                )
            if self.partial_rollouts and policy.rollout_revision:
                raise UserError(
                    f"partial_rollouts is True, but policies.{name}.rollout_revision is"
                    f" {policy.rollout_revision!r}, whose weights no update changes: drop one"
                )
        if self.partial_rollouts and not self.max_staleness:
            raise UserError(
                "partial_rollouts is True, but max_staleness is 0, so that no update comes before a"
                " completion ends: set max_staleness to 1 or more, or drop partial_rollouts"
            )

    def preflight(self) -> None:
        super().preflight()
        for name, policy in self.policies.items():
            if self.reward_processes and callable(env_lib.REGISTRY.get(policy.env.name)):
                raise UserError(
                    f"policies.{name}.env is {policy.env.name!r}, a function of this process, and"
                    f" reward_processes is {self.reward_processes}: name it module:factory, which"
                    " other processes can import, or set reward_processes to 0"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Open):
    """Examples of SFT or DPO: a file, or an environment, whose options are further settings. SFT
    also takes rollouts that the catalog has stored.
    """

    path: Place = setting("file that data.sources reads, .jsonl or .parquet for instance", "")
    rollouts: tuple[str, ...] = setting(
        "policies of the catalog whose stored rollouts are the examples, as NAME or NAME@8-12 "
        "(steps)",
        (),
    )
    min_reward: float | None = setting("leave out rollouts of a lower reward; unset: none", None)
    held_out: Natural | None = setting("first rows to measure on only; unset: a tenth", None)
    env: str = setting(f"without a path: {ENVIRONMENTS}", "")
    append_eos: bool = setting("end plain texts and their replies with the end token", True)
    max_tokens: Natural = setting("largest row, prompt and answer; 0: the base's context", 0)
    too_long: Annotated[str, ("refuse", "cut", "drop")] = setting("fate of longer rows", "refuse")

    def __post_init__(self):
        if bool(self.path or self.env) == bool(self.rollouts):
            raise UserError(
                f"path is {self.path!r}, env {self.env!r} and rollouts {self.rollouts!r}; expected"
                " one of path (a .jsonl or .parquet file), env (an environment's name) and rollouts"
                " (names of policies in the catalog)"
            )
        if self.min_reward is not None and not self.rollouts:
            raise UserError(f"min_reward is {self.min_reward}, and only rollouts have rewards")
        if self.extra and not self.env:
            raise UserError(
                f"{next(iter(self.extra))} is no setting of a file: drop it, or name an environment"
            )

    def preflight(self, where: str) -> None:
        if self.path:
            check_data(f"{where}.path", self.path)
        elif self.env:
            check_environment(where, self.env, self.extra)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftPolicy(PolicySettings):
    """A policy of SFT. It also takes registered losses of log-probabilities alone."""

    data: DataSettings = setting("examples")
    batch_size: Count = setting("examples of an update", 8)
    loss: LossConfig = setting("cross-entropy, with kl if set", LossConfig(kind="cross_entropy"))

    def __post_init__(self):
        kind = type(self).__dataclass_fields__["loss"].default.kind
        shipped = PAIRED if kind in PAIRED else (kind,)
        is_own = kind == "cross_entropy" and self.loss.kind not in KINDS
        if self.loss.kind not in shipped and not (is_own and self.loss.needs <= {"ref_logp"}):
            raise UserError(
                f"loss.kind is {self.loss.kind!r}, but this job minimises {' or '.join(shipped)}:"
                " drop loss.kind, or choose another job"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftSettings(TrainingSettings):
    """Settings of SFT."""

    policies: dict[str, SftPolicy] = setting("policies by name")

    def preflight(self) -> None:
        super().preflight()
        for name, policy in self.policies.items():
            if policy.data.rollouts and not self.catalog:
                raise UserError(
                    f"policies.{name}.data.rollouts is {policy.data.rollouts!r}, but catalog is"
                    " empty: set --config.catalog to the catalog that has the rollouts"
                )
            if policy.data.rollouts:
                need_catalog(self.catalog)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoPolicy(SftPolicy):
    """A policy of DPO."""

    loss: LossConfig = setting("the loss of pairs", LossConfig(kind="dpo"))

    def __post_init__(self):
        super().__post_init__()
        if self.data.rollouts:
            raise UserError(
                f"data.rollouts is {self.data.rollouts!r}, which are no pairs: choose job sft"
            )


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
    adapter_uris: tuple[str, ...] = setting(
        "places of adapters that a request's model may name: file:/folder, s3://bucket, hf:org", ()
    )
    api_keys: Place = setting("folder of mint_jax.service.keys; empty: no keys, loopback only", "")
    hosts: tuple[str, ...] = setting("further Host headers that a server without keys takes", ())
    certificate: Place = setting("TLS certificate with its chain; empty: no TLS", "")
    private_key: Place = setting("key of the certificate, where its file has none", "")
    behind_tls: bool = setting("a proxy in front of the server encrypts", False)
    ranks: tuple[int, ...] = setting(
        "powers of two; a policy gets the next larger one. With 0, revisions of biases are sampled",
        (32,),
    )
    experts: Annotated[str, FORMS] = setting("factors of routed experts' adapters", "each")
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
    routing: bool = setting(
        "a policy that suits the prompt answers requests for the model auto", False
    )
    wait_cost: Amount = setting("reward that a second of waiting costs the choice of auto", 0.1)
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
        for uri in self.adapter_uris:
            kinds = ("file:/", "s3://", "gs://", "hf:")
            if not uri.startswith(kinds) or not uri.rstrip("/").partition(":")[2]:
                raise UserError(
                    f"adapter_uris has {uri!r}; expected file:/FOLDER, s3://BUCKET, gs://BUCKET or"
                    " hf:ORG"
                )
        if not any(self.ranks):
            raise UserError(
                f"ranks is {self.ranks}; expected the ranks that policies may have: (8, 32)"
            )

    creates_catalog = needs_one_process = True

    def preflight(self) -> None:
        super().preflight()
        for module in SERVICE_PACKAGES.split():
            need_package(module, "serve", "the service")
        if self.routing:
            need_package("faiss", "route", "routing")
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
class FleetSettings(ServeSettings):
    """Settings of a fleet: of its front, and of the service of each engine."""

    engines: Count = setting("number of engines, each with the whole base", 2)
    gpus: Natural = setting("GPUs of an engine", 0)
    tpus: Natural = setting("TPU chips of an engine", 0)
    engine_host: Annotated[str, ("", "0.0.0.0")] = setting(
        "where engines listen: empty: loopback; 0.0.0.0: on several machines, which needs keys", ""
    )

    move_after_s: Amount = setting(
        "seconds without an engine's process after which another engine serves its sessions", 60.0
    )

    def preflight(self) -> None:
        super().preflight()
        need_package("ray", "fleet", "the fleet")
        if self.gpus and self.tpus:
            raise UserError(
                f"gpus is {self.gpus} and tpus {self.tpus}; expected one kind of accelerator: set"
                " the other to 0"
            )
        if self.engine_host and not self.api_keys:
            raise UserError(
                f"engine_host is {self.engine_host!r} without keys: anybody could use the engines;"
                " set --config.api_keys, or leave engine_host empty"
            )
        if self.precompile == "only":
            raise UserError(
                "precompile is 'only', which ends after compiling; expected 'background' or"
                " 'before': fill the cache with configs/serve.py"
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
    if name in ("jsonl", "judge"):
        check_data(f"{where}.path", options["path"])


def check_data(where: str, path: str) -> None:
    """Checks that a data file exists, and that its reader is installed."""
    if not Path(path).is_file():
        raise UserError(f"{where}: data file {path} does not exist: set --config.{where}")
    if path.endswith(ROW_FILES):
        need_package("pyarrow", "data", f"reading {path}")
