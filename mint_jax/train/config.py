"""Configuration of a policy in training: loss, optimizer and step shapes of live training.

Imports no jax: ``launch`` checks configs with these classes before anything slow is imported.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mint_jax.errors import UserError, choice
from mint_jax.fields import Settings, setting
from mint_jax.lora.config import AdapterConfig

BUILT_IN = {  # losses and the data fields that each needs, as ``losses.reads`` finds them
    "cross_entropy": frozenset(),
    "reinforce": frozenset(("advantages",)),
    "importance_sampling": frozenset(("advantages", "old_logp")),
    "ppo": frozenset(("advantages", "old_logp")),
    "cispo": frozenset(("advantages", "old_logp")),
    "dpo": frozenset(("ref_logp", "pairs")),
    "gspo": frozenset(("advantages", "old_logp")),
    "dro": frozenset(("advantages", "old_logp")),
    "ipo": frozenset(("ref_logp", "pairs")),
    "simpo": frozenset(("pairs",)),
}
KINDS = tuple(BUILT_IN)
PAIRED = tuple(kind for kind, needed in BUILT_IN.items() if "pairs" in needed)
KL_KINDS = ("none", "k1", "k3", "k2")
# The losses that read an option which is off by default.
USERS = {
    "dual_clip": ("ppo", "gspo"),
    "sampler_cap": ("importance_sampling", "ppo", "cispo", "gspo"),
    "label_smoothing": ("dpo", "simpo"),
}
SCHEDULES = ("constant", "linear", "cosine")
OPTIMIZERS = ("adamw", "dimuon")


class Registered(NamedTuple):
    """A user's loss (``losses.LossFn``) and the data fields that it needs."""

    fn: Callable[[Any], Any]
    needs: frozenset[str]


registered: dict[str, Registered] = {}  # by name; see ``losses.register_loss``


def known_kinds() -> tuple[str, ...]:
    return (*KINDS, *registered)


def needs(kind: str) -> frozenset[str]:
    """Returns the data fields that a loss needs, among ``advantages``, ``old_logp``, ``ref_logp``
    and ``pairs``.
    """
    if kind not in known_kinds():
        raise choice("loss", kind, known_kinds())
    return BUILT_IN[kind] if kind in BUILT_IN else registered[kind].needs


@dataclasses.dataclass(frozen=True, repr=False)
class LossConfig(Settings):
    """Loss of one policy; ``losses`` has the formulas."""

    kind: str = setting(f"{', '.join(KINDS)}, or a name given to mint_jax.register_loss", "ppo")
    clip_low: float | None = setting(
        "PPO, GSPO and CISPO clip the probability ratio at 1 - clip_low; unset: 1 (no bound) for "
        "CISPO, else 0.2",
        None,
    )
    clip_high: float = setting("PPO, GSPO, CISPO clip the probability ratio at 1 + clip_high", 0.2)
    dual_clip: float = setting(
        "PPO and GSPO also clip the ratio here where the advantage is negative; inf: no clip",
        math.inf,
    )
    kl_kind: str = setting("estimator of the KL to the reference: none, k1, k2 or k3", "none")
    kl: float = setting("coefficient of the KL to the reference", 0.0)
    band_low: float = setting(
        "tokens whose ratio of trainer to sampler probability is lower are masked; 0: none", 0.0
    )
    band_high: float = setting(
        "tokens whose ratio of trainer to sampler probability is higher are masked; inf: none",
        math.inf,
    )
    sampler_cap: float = setting(
        "bound of the ratio of trainer to sampler probability that weighs a token (truncated "
        "importance sampling); inf: none",
        math.inf,
    )
    entropy: float = setting("coefficient of the entropy of each target's distribution", 0.0)
    dpo_beta: float = setting(
        "DPO's beta and IPO's tau: a larger one keeps the policy nearer to its reference", 0.1
    )
    label_smoothing: float = setting(
        "DPO, SimPO: probability that a pair is in the wrong order", 0.0
    )
    simpo_beta: float = setting("SimPO's beta, of log-probabilities per token", 2.0)
    simpo_margin: float = setting("SimPO's gamma, which a pair's margin should exceed", 1.0)
    dro_beta: float = setting("DRO's beta", 0.05)
    reference: str = setting(
        "policy that KL and DPO compare with: start, the adapter that training began with (a new "
        "one equals the base); base; or a revision's name",
        "start",
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.reference:
            raise UserError(
                "loss.reference is empty; expected 'start', 'base' or a revision's name"
            )
        if self.kind not in known_kinds():
            raise choice("loss", self.kind, known_kinds())
        if self.kl_kind not in KL_KINDS:
            raise choice("kl_kind", self.kl_kind, KL_KINDS)
        checks = {
            "clip_low": (0 <= self.low <= 1, "0 to 1"),
            "clip_high": (self.clip_high >= 0, "at least 0"),
            "dual_clip": (self.dual_clip > 1 + self.clip_high, "more than 1 + clip_high"),
            "kl": (0 <= self.kl < math.inf, "a finite number of at least 0"),
            "band_low": (0 <= self.band_low <= self.band_high, "0 to band_high"),
            "sampler_cap": (self.sampler_cap > 0, "more than 0"),
            "entropy": (math.isfinite(self.entropy), "a finite number"),
            "dpo_beta": (0 < self.dpo_beta < math.inf, "a finite number above 0"),
            "label_smoothing": (0 <= self.label_smoothing < 0.5, "0 or more, and less than 0.5"),
            "simpo_beta": (0 < self.simpo_beta < math.inf, "a finite number above 0"),
            "simpo_margin": (0 <= self.simpo_margin < math.inf, "a finite number of at least 0"),
            "dro_beta": (self.dro_beta >= 0, "at least 0"),
        }
        for name, (is_fine, expected) in checks.items():
            if not is_fine:
                raise UserError(f"loss.{name} is {getattr(self, name)}; expected {expected}")
        for name, users in USERS.items():
            is_set = getattr(self, name) != type(self).__dataclass_fields__[name].default
            if is_set and self.kind in set(KINDS) - set(users):
                raise UserError(
                    f"loss.{name} is {getattr(self, name)}, which loss {self.kind!r} does not use:"
                    f" drop it, or choose {' or '.join(users)}"
                )
        if self.kl_kind == "k1" and "advantages" not in needs(self.kind):
            raise UserError(
                f"kl_kind 'k1' adjusts advantages, which loss {self.kind!r} does not use: choose"
                " 'k2', 'k3' or 'none'"
            )

    @property
    def low(self) -> float:
        """``clip_low``, or the default of the loss's paper."""
        return self.clip_low if self.clip_low is not None else 1.0 if self.kind == "cispo" else 0.2

    @property
    def needs(self) -> frozenset[str]:
        """Data fields that the loss needs; see ``needs``."""
        also = {"ref_logp"} if self.kl_kind != "none" and self.kl != 0.0 else set()
        return needs(self.kind) | also | ({"old_logp"} if self.is_banded else set())

    @property
    def needs_reference(self) -> bool:
        return "ref_logp" in self.needs

    @property
    def is_banded(self) -> bool:
        return self.samples and (self.band_low > 0 or self.band_high < math.inf)

    @property
    def samples(self) -> bool:
        """True if later updates on the same tokens are measured against the first."""
        return self.kind not in ("cross_entropy", *PAIRED)


@dataclasses.dataclass(frozen=True, repr=False)
class OptimizerConfig(Settings):
    """Optimizer of one policy and its learning-rate schedule; ``optimizers`` has the formulas."""

    learning_rate: float = setting("peak learning rate", 1e-4)
    b1: float = setting("decay of the first moment", 0.9)
    b2: float = setting("AdamW: decay of the second moment", 0.999)
    eps: float = setting(
        "AdamW: added to the root of the second moment; dimuon: damping of the scales of rows and "
        "columns, 1e-4 say",
        1e-8,
    )
    weight_decay: float = setting("decoupled, times the learning rate", 0.0)
    max_grad_norm: float = setting("bound of the policy's own global gradient norm; 0: none", 1.0)
    warmup_steps: int = setting("updates of a linear warm-up from 0", 0)
    total_steps: int = setting("update at which the schedule ends", 0)
    schedule: str = setting(
        "after warm-up: constant, or linear or cosine down to final_fraction of the peak at "
        "total_steps",
        "constant",
    )
    final_fraction: float = setting("share of the peak learning rate at total_steps", 0.0)
    b_ratio: float = setting("learning rate of B relative to that of A (LoRA+)", 1.0)
    kind: str = setting("adamw, or dimuon: the orthogonal direction of the first moment", "adamw")

    def __post_init__(self):
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise choice("schedule", self.schedule, SCHEDULES)
        if self.kind not in OPTIMIZERS:
            raise choice("optimizer.kind", self.kind, OPTIMIZERS)
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"total_steps is {self.total_steps} and warmup_steps {self.warmup_steps}; "
                f"schedule {self.schedule!r} needs total_steps > warmup_steps"
            )
        if not (self.learning_rate >= 0 and math.isfinite(self.learning_rate)):
            raise UserError(f"learning_rate is {self.learning_rate}; expected a finite number >= 0")
        if not 0 < self.b_ratio < math.inf:
            raise UserError(f"b_ratio is {self.b_ratio}; expected a finite number above 0, 16 say")


def check_dropout(rate: float, where: str = "") -> None:
    if not 0 <= rate < 1:
        raise UserError(f"{where}dropout is {rate}; expected 0 or more, and less than 1: 0.1, say")


@dataclasses.dataclass(frozen=True, repr=False)
class PolicyConfig(Settings):
    """Definition of one policy in training."""

    name: str
    adapter: AdapterConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    seed: int = 0
    init: str = "uniform"  # see ``lora.config.INITS``
    dropout: float = 0.0  # probability that an input of the adapter is dropped in training

    def __post_init__(self):
        super().__post_init__()
        check_dropout(self.dropout)


class BlockShape(NamedTuple):
    """Shape of one step: P blocks of B rows of T tokens, with K targets a position."""

    blocks: int
    rows: int
    tokens: int
    width: int = 1

    @property
    def size(self) -> int:
        """Number of tokens, padding included."""
        return self.blocks * self.rows * self.tokens


# Step shapes of live training on accelerators and on CPUs. On a CPU a token of a long row costs
# nearly the same in any batch: rows of 256 take 5.3 ms a token alone and 4.8 in fours (CPU time,
# SmolLM2, two cores), and steps longer than a server's ``idle_gap_s`` are never chosen. Short rows
# gain: a row of 64 takes 7.5 ms a token alone and 4.8 in a batch of eight.
SHAPES = (
    BlockShape(1, 1, 256),
    BlockShape(8, 1, 256),
    BlockShape(1, 1, 1024),
    BlockShape(4, 1, 1024),
    BlockShape(1, 1, 1024, 32),
)
CPU_SHAPES = (
    BlockShape(1, 1, 64),
    BlockShape(8, 1, 64),
    BlockShape(1, 1, 256),
    BlockShape(1, 1, 1024),
    BlockShape(1, 1, 1024, 32),
)
