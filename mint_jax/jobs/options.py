"""What the config of each job may have, as frozen dataclasses; ``settings`` reads, checks and
describes them.

Imports no jax, nor anything else that takes long: a mistake on the command line is reported before
JAX is imported.
"""

import dataclasses
from typing import Annotated, Any

import numpy as np

from mint_jax.aot.schedule import CHIPS as SCHEDULED_CHIPS
from mint_jax.aot.shapes import RolloutShape, TrainShape
from mint_jax.envs import scoring
from mint_jax.errors import UserError, choice
from mint_jax.lora.config import AdapterConfig
from mint_jax.models import names
from mint_jax.models.kernels import Kernels
from mint_jax.rollout.ranges import check_ranges
from mint_jax.train import advantages
from mint_jax.train.config import KINDS, LossConfig, OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Least:
    """The smallest value of a number, as an annotation."""

    value: float


Place = Annotated[str, "path"]
Count = Annotated[int, Least(1)]
Natural = Annotated[int, Least(0)]
TOO_LONG = ("refuse", "cut", "drop")
PRECOMPILE = ("background", "before", "only")


class Open:
    """A section that takes names beyond its fields."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How the devices are divided; one axis may be -1, whatever is left.

    Attributes:
        data: copies of the base; each takes a part of the rows.
        fsdp: parts of the base's width, and of the rows.
        expert: parts of the rows, and of routed experts.
        tensor: parts of heads, ffw and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnBase:
    """What every job over a base has.

    Attributes:
        job: what to run.
        base: a checkpoint directory, a hub's name for one, or the name of a packaged base.
        dtype: storage and compute of the base: float32 or bfloat16.
        quantise: int8 or float8 stores the matrices of the layers in 8 bits; empty: as dtype says.
        as_stored: weights that the checkpoint has in 16 bits, or in blocks of 8 and 4, stay so on
            one CPU: the same numbers in fewer bytes.
        mesh: how the devices are divided.
        kernels: which implementation each of our own kernels has.
    """

    job: str
    base: Place
    dtype: str = "float32"
    quantise: str = ""
    as_stored: bool = True
    mesh: Mesh = Mesh()
    kernels: Kernels = Kernels()

    def __post_init__(self):
        if self.dtype not in names.DTYPES:
            raise choice("dtype", self.dtype, names.DTYPES)
        if self.quantise not in ("", *names.QUANTISED):
            raise choice("quantise", self.quantise, ["", *names.QUANTISED])


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithCatalog(OnBase):
    """What jobs over a base and a catalog have.

    Attributes:
        catalog: a folder or a database's URL; training makes WORKDIR/catalog where none is named.
        payloads: folder, s3:// or gs:// of the payloads; empty: inside the catalog's folder.
    """

    catalog: Place = ""
    payloads: Place = ""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When training is saved.

    Attributes:
        every: steps from one checkpoint to the next.
        keep: how many checkpoints stay.
    """

    every: Count = 10
    keep: Count = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(WithCatalog):
    """What grpo, sft and dpo have.

    Attributes:
        seed: of data order, adapters and sampling; each policy's own derives from it and the
            policy's name.
        steps: updates of each policy.
        remat: what the backward pass keeps: a name in models.transformer.REMAT.
        max_tokens_per_pass: tokens of one forward and backward pass; larger updates take several,
            of as many policies at once as fit, and have temporaries for the gradients of those
            alone.
        tenant: whose the policies are in the catalog.
        export_every: steps from one revision to the next; the last step always exports.
        eval_every: steps from one measurement on held-out data to the next, the best of which the
            alias best names; 0: none on the way.
        checkpoint: when training is saved.
        tensorboard: whether metrics are written for TensorBoard too.
        wandb: a Weights & Biases project that gets them too; empty: none.
        mlflow: an MLflow experiment that gets them too; empty: none.
    """

    seed: Natural = 0
    steps: Count
    remat: str = "names"
    max_tokens_per_pass: Count = 16384
    tenant: str = "default"
    export_every: Count = 10
    eval_every: Natural = 0
    checkpoint: Checkpoint = Checkpoint()
    tensorboard: bool = True
    wandb: str = ""
    mlflow: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a policy in training has in every job.

    Attributes:
        adapter: shape and scale.
        optimizer: AdamW and its schedule.
        loss: what is minimised.
        seed: in place of the one that derives from the run's and the policy's name.
    """

    adapter: AdapterConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    seed: Natural | None = None


@dataclasses.dataclass(frozen=True)
class Env(Open):
    """A task; further settings are the environment's own options.

    Attributes:
        name: a name in envs.env.REGISTRY, or module:factory.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class GrpoSampling:
    """How a policy's rollouts are drawn and turned into a batch.

    Attributes:
        prompts: prompts a step.
        group_size: rollouts a prompt.
        max_tokens, stop: see ``rollout.request.Request``.
        temperature: above 0 in training, which is of the distribution that is sampled:
            log-probabilities of ``logits / temperature``.
        top_k, top_p, min_p: off in training. A filter's support moves with the policy, so that the
            gradient of what it draws is not that of the renormalised probabilities: such rollouts
            cannot train.
        baseline, divide_by_std, normalisation: see ``train.advantages``.
        updates: optimizer updates on the same rollouts; more than 1 makes the later ones
            off-policy.
        replay: train through the experts that the sampler visited (R3); without effect on a base
            that has none.
    """

    prompts: int = 8
    group_size: int = 8
    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    baseline: str = "group_mean"
    divide_by_std: bool | None = None
    normalisation: str = "token"
    updates: int = 1
    replay: bool = True

    def __post_init__(self):
        if min(self.prompts, self.group_size, self.max_tokens, self.updates) < 1:
            raise UserError(
                f"{self}: prompts, group_size, max_tokens and updates must be at least 1"
            )
        check_ranges(self, "sampling.")
        # refuses now what it would refuse later
        advantages.group_advantages(np.zeros((1, self.group_size)), self.baseline)
        advantages.token_weights([1], self.normalisation)

    def check_trains(self) -> None:
        """Refuses rollouts that cannot train; ``evaluate`` may draw as it likes.

        Raises:
            UserError: greedy rollouts, or filtered ones.
        """
        if not 1e-30 <= self.temperature <= 1e30:
            raise UserError(
                f"sampling.temperature is {self.temperature}; rollouts that train are drawn: set a "
                "number above 0, 1e-30 to 1e30 (0 is greedy, and has no gradient)"
            )
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != off:
                raise UserError(
                    f"sampling.{name} is {getattr(self, name)}; rollouts that train are drawn from"
                    f" the whole distribution, a filter's choice has no gradient: leave {name} at"
                    f" {off}, and lower the temperature for likelier tokens"
                )

    @property
    def drawing(self) -> dict[str, Any]:
        """What decides how tokens are drawn."""
        return {
            name: getattr(self, name)
            for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoPolicy(Policy):
    """What a policy of this job has.

    Attributes:
        env: its task.
        sampling: how its rollouts are drawn and turned into a batch.
        rollout_revision: a revision or PEFT directory that its rollouts are drawn from; empty: the
            policy as it is.
    """

    env: Env
    sampling: GrpoSampling = GrpoSampling()
    rollout_revision: Place = ""

    def __post_init__(self):
        self.sampling.check_trains()
        if "advantages" not in self.loss.needs:
            raise UserError(
                f"loss.kind is {self.loss.kind!r}, which rewards do not enter: choose ppo, say, or"
                " job sft or dpo"
            )


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """How policies are evaluated before and after training.

    Attributes:
        examples: held-out prompts at most.
        samples: completions a prompt.
    """

    examples: Count = 24
    samples: Count = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Training):
    """What the job has.

    Attributes:
        schedule: how steps of different policies share the devices: sequential, overlapped or
            batched.
        cohorts: groups of policies that take turns, with schedule batched.
        reward_workers: threads that compute rewards.
        reward_timeout: seconds that the reward of one completion may take; 0: any time.
        max_rows: rows that are sampled together.
        cache_gib: of the sampler's cache, GiB at most; 0: one on a CPU, most of the free memory
            elsewhere.
        keep_rollouts: rollouts of this many last steps are kept in the catalog; 0 keeps none.
        eval: how policies are evaluated before and after training.
        router_noise: spread of the noise on the weights of the trainer's routers, for studies of
            replay.
        trainer_dtype: of a base of the trainer's own, where it is to differ from the sampler's, for
            the same studies.
        trainer_quantise: of that base: int8, float8, or empty for none; not set: as the sampler's.
        policies: by name.
    """

    schedule: str = "batched"
    cohorts: Count = 1
    reward_workers: Count = 4
    reward_timeout: float = scoring.TIMEOUT_S
    max_rows: Count = 256
    cache_gib: float = 0.0
    keep_rollouts: Natural = 8
    eval: HeldOut = HeldOut()
    router_noise: float = 0.0
    trainer_dtype: str = ""
    trainer_quantise: str | None = None
    policies: dict[str, GrpoPolicy]


@dataclasses.dataclass(frozen=True)
class Data(Open):
    """What a policy learns from: a file, or an environment, whose options are further

    Attributes:
        path: file of a form that ``data.sources`` reads, .jsonl or .parquet say, with rows as
            ``data.chat`` reads them.
        held_out: this many first rows are not learned but measured; a tenth by default.
        env: where no path is given: a name in envs.env.REGISTRY, or module:factory.
        append_eos: end texts, and replies to prompts that are text, with the checkpoint's end
            token; chat templates end theirs.
        max_tokens: of a row, prompt and answer together; 0: what the base's context holds.
        too_long: what becomes of a longer row: refuse ends the run before it begins, cut drops what
            is beyond, drop the whole row.
    """

    path: Place = ""
    held_out: Natural | None = None
    env: str = ""
    append_eos: bool = True
    max_tokens: Natural = 0
    too_long: str = "refuse"

    def __post_init__(self):
        if self.too_long not in TOO_LONG:
            raise choice("too_long", self.too_long, TOO_LONG)
        if not self.path and not self.env:
            raise UserError(
                "there is neither path nor env; expected path (a .jsonl or .parquet file) or env"
                " (an environment's name)"
            )


def _only(loss: LossConfig, kind: str, job: str) -> None:
    """Refuses a loss that the job's data cannot feed: it has its own, and SFT registered ones of
    log-probabilities alone.

    Raises:
        UserError: with the job that has it.
    """
    if loss.kind != kind and (
        loss.kind in KINDS or not loss.needs <= {"ref_logp"} or kind != "cross_entropy"
    ):
        raise UserError(
            f"loss.kind is {loss.kind!r}, but job {job} minimises {kind!r}: drop loss.kind, or"
            " choose another job"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedPolicy(Policy):
    """What a policy of these jobs has.

    Attributes:
        data: what it learns from.
        batch_size: examples of an update.
    """

    data: Data
    batch_size: Count = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftPolicy(SupervisedPolicy):
    """What a policy of this job has.

    Attributes:
        loss: cross-entropy; ``kl`` keeps the policy near its reference, on the targets' tokens.
    """

    loss: LossConfig = LossConfig(kind="cross_entropy")

    def __post_init__(self):
        _only(self.loss, "cross_entropy", "sft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sft(Training):
    """What the job has.

    Attributes:
        policies: by name.
    """

    policies: dict[str, SftPolicy]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpoPolicy(SupervisedPolicy):
    """What a policy of this job has.

    Attributes:
        loss: of pairs. ``dpo_beta`` says how far the policy may leave its reference: the larger,
            the less.
    """

    loss: LossConfig = LossConfig(kind="dpo")

    def __post_init__(self):
        _only(self.loss, "dpo", "dpo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(Training):
    """What the job has.

    Attributes:
        policies: by name.
    """

    policies: dict[str, DpoPolicy]


@dataclasses.dataclass(frozen=True)
class LineSampling:
    """What a line may have of its own.

    Attributes:
        max_tokens: new tokens at most.
        temperature: 0 is greedy.
        top_k, top_p, min_p: filters, see ``rollout.sample.SamplingParams``.
        repetition_penalty: divides logits above 0, and multiplies others, of all tokens of prompt
            and completion; 1: none.
        frequency_penalty, presence_penalty: subtracted from the logit of a token for each time that
            the completion has it, and once.
        ignore_eos: go on behind the checkpoint's end tokens.
        top_logprobs: of so many of the likeliest tokens at each place the log-probabilities are
            written too.
        prompt_logprobs: the log-probabilities of the prompt's tokens are written too.
        top_prompt_logprobs: as ``top_logprobs``, at each place of the prompt.
        prompt_alternatives: so many tokens are drawn at each place of the prompt, and written with
            their log-probabilities.
        json_schema: the completion is JSON that this schema describes; a line may give it as an
            object.
        regex: the completion matches this regular expression as a whole.
        choice: the completion is one of these texts.
        seed: completion i draws from a hash of seed and i; the same seed gives the same tokens in
            any batch.
        n: completions of a line.
        stop: strings that end a completion.
        stop_ids: token ids that end a completion, beside the checkpoint's own.
    """

    max_tokens: Count = 64
    temperature: float = 1.0
    top_k: Natural = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    top_logprobs: Natural = 0
    prompt_logprobs: bool = False
    top_prompt_logprobs: Natural = 0
    prompt_alternatives: Natural = 0
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
    seed: int = 0
    n: Count = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        check_ranges(self, "sampling.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(WithCatalog):
    """What the job has.

    Attributes:
        input: JSONL file of prompts.
        output: JSONL file of completions.
        slots: adapters on the device at once, of each rank bucket; more take turns.
        max_rows: rows that are sampled together.
        cache_gib: of the sampler's cache, GiB at most; 0: one on a CPU, most of the free memory
            elsewhere.
        sampling: of lines that do not say otherwise.
    """

    input: Place = ""
    output: Place = ""
    slots: Count = 64
    max_rows: Count = 64
    cache_gib: float = 0.0
    sampling: LineSampling = LineSampling()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(WithCatalog):
    """What the job has.

    Attributes:
        input: JSONL file of texts or tokens.
        output: JSONL file of log-probabilities.
        slots: adapters on the device at once, of each rank bucket; more take turns.
        max_tokens: tokens of a batch, padding included.
    """

    input: Place = ""
    output: Place = ""
    slots: Count = 64
    max_tokens: Count = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(WithCatalog):
    """What the job has.

    Attributes:
        env: the task.
        seed: completion i of example k draws from a hash of seed + k * samples and i.
        examples: held-out examples at most.
        samples: completions an example.
        adapters: label -> policy@alias, policy@12, a digest or a PEFT directory; empty is the base.
        sampling: how completions are drawn.
        max_rows: rows that are sampled together.
        cache_gib: of the sampler's cache, GiB at most; 0: one on a CPU, most of the free memory
            elsewhere.
        slots: adapters in one batch, and on the device at once.
        reward_timeout: seconds that the reward of one completion may take; 0: any time.
    """

    env: Env
    seed: Natural = 0
    examples: Count = 30
    samples: Count = 4
    adapters: dict[str, Place]
    sampling: GrpoSampling | None = None
    max_rows: Count = 64
    cache_gib: float = 0.0
    slots: Count = 64
    reward_timeout: float = scoring.TIMEOUT_S


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(WithCatalog):
    """What the job has.

    Attributes:
        host: where it listens; other places than loopback need keys, and a certificate or a proxy
            that has one.
        port: 0: any that is free.
        name: what clients call the base; empty: as base says.
        tokenizer: what Tinker's clients load the tokenizer by, a hub's name or a folder that they
            see; empty: the base's name.
        peft_folder: below which /v1/load_lora_adapter may read PEFT adapters; empty: nowhere.
        api_keys: folder of API keys, which python -m mint_jax.service.keys makes; empty: everybody
            may do everything, on loopback alone.
        hosts: names by which a server without keys is reached beside localhost and its addresses,
            behind a proxy say; requests whose Host header has another are refused.
        certificate: file of a TLS certificate with its chain; empty: no TLS.
        private_key: its file, where the certificate's has none.
        behind_tls: a proxy before the server encrypts.
        ranks: of policies: each takes the next of these, powers of two.
        slots: of policies in training on the device, for each of ranks; further ones wait in memory
            and on the disk.
        adapters: of revisions to be sampled on the device, for each of ranks.
        shapes: blocks, rows, tokens and targets a position of the training steps there are; empty:
            those that suit the devices.
        max_rows: rows that are sampled together.
        cache_gib: of the sampler's cache, GiB at most; 0: one on a CPU, most of the free memory
            elsewhere.
        reuse_decoded: prompts that begin with what was drawn before, a chat's next turn say, are
            not read again as far as the cache has them; log-probabilities behind it then depend on
            that in the last bits (by 2e-5 at most in float32).
        host_gib: of idle policies' states in host memory, and of cached adapters, each.
        gap_s: seconds that rows which decode wait for a training step at most, where any is as
            short.
        idle_gap_s: the same while none decode.
        precompile: background: requests are served as soon as their own programs are compiled, the
            others are compiled meanwhile; before: none is served before all are; only: compiles all
            into the cache and ends, for images and later starts.
        snapshot_every: updates of a policy between two snapshots of its state.
        snapshot_s: seconds after which one is taken all the same.
        session_s: seconds without a request of its client after which a session ends, and its
            policies leave training; only time in which the server runs counts, from its start at
            the earliest.
        openai_limits: what OpenAI's API refuses is refused: a temperature above 2, more than 5
            logprobs of completions, more than 4 stop strings, roles that it does not have; False:
            what the engine can do is taken.
        body_mb: of a request's body, MB at most; on paths that take no data a body may have 1 MB.
        bodies_gib: of memory for the bodies of all requests in flight, as sent and as parsed, GiB;
            where there is no room a request gets 429 and is asked again, one that is larger by
            itself 413.
        tenant_requests: of one tenant in flight; more are told to come back.
        tenant_tokens: of one tenant's samples and training requests in flight, likewise; 0: any
            number. This and the next two are of tenants of which quotas.json, beside the keys, says
            nothing else.
        tenant_policies: of one tenant in training; 0: any number.
        tenant_gib: of one tenant's named checkpoints and training states, GiB; 0: any number.
    """

    host: str = "127.0.0.1"
    port: Natural = 8000
    name: str = ""
    tokenizer: Place = ""
    peft_folder: Place = ""
    api_keys: Place = ""
    hosts: tuple[str, ...] = ()
    certificate: Place = ""
    private_key: Place = ""
    behind_tls: bool = False
    ranks: tuple[int, ...] = (32,)
    slots: Count = 4
    adapters: Count = 16
    shapes: tuple[Any, ...] = ()
    max_rows: Count = 32
    cache_gib: float = 0.0
    reuse_decoded: bool = False
    host_gib: float = 4.0
    gap_s: float = 0.5
    idle_gap_s: float = 2.0
    precompile: str = "background"
    snapshot_every: Count = 16
    snapshot_s: float = 60.0
    session_s: float = 86400.0
    openai_limits: bool = True
    body_mb: Count = 64
    bodies_gib: float = 1.0
    tenant_requests: Count = 1000
    tenant_tokens: Natural = 0
    tenant_policies: Natural = 0
    tenant_gib: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.precompile not in PRECOMPILE:
            raise choice("precompile", self.precompile, PRECOMPILE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrain:
    """What the job has.

    Attributes:
        job: what to run.
        seed: of weights and data order.
        steps: updates.
        batch_size: examples of an update.
        learning_rate: peak value.
        envs: tasks, each a dict with a name and that environment's options.
        model: fields of the model's config.json; the vocabulary is that of the characters.
    """

    job: str
    seed: Natural = 0
    steps: Count
    batch_size: Count = 64
    learning_rate: float = 3e-3
    envs: tuple[Any, ...]
    model: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleUp:
    """What the job has.

    Attributes:
        job: what to run.
        base: what to call the model.
        dtype: of the base: float32 or bfloat16.
        topology: a pod, such as v5p:2x2x1 or v5p-8, as clouds name it, or smallest: the smallest of
            a chip's pods that holds everything.
        chip: whose pods smallest tries.
        mesh: how the devices are divided.
        kernels: which implementation each of our own kernels has.
        margin: of the memory of each device, to stay free.
        hlo: write the compiled programs beside the result.
        quantise: int8 or float8: the base's matrices in 8 bits; empty: as dtype says.
        adapter: of every policy.
        train: the training step.
        rollout: sampling.
        model: fields of the model's config.json.
    """

    job: str
    base: str
    dtype: str = "bfloat16"
    topology: str
    chip: str = "v5p"
    mesh: Mesh = Mesh()
    kernels: Kernels = Kernels()
    margin: float = 0.05
    hlo: bool = False
    quantise: str = ""
    adapter: AdapterConfig
    train: TrainShape
    rollout: RolloutShape
    model: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the job has.

    Attributes:
        job: what to run.
        chips: pods whose chip is compiled for; of each the smallest that can be had.
    """

    job: str
    chips: tuple[str, ...] = tuple(SCHEDULED_CHIPS)


OF_JOB: dict[str, type] = {
    "grpo": Grpo,
    "sft": Sft,
    "dpo": Dpo,
    "evaluate": Evaluate,
    "sample": Sample,
    "score": Score,
    "serve": Serve,
    "pretrain": Pretrain,
    "scale_up": ScaleUp,
    "schedule": Schedule,
}
