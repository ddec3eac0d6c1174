"""``ModelConfig``: dimensions and switches of a model.

A model is described by these fields, never by testing its name; ``hf_config.py`` reads them from a
``config.json``.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from mint_jax.models.kernels import Kernels


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings beyond the trained context.

    ``llama3``: arXiv 2407.21783, section 3.4.2, and its released code; ``yarn``: arXiv 2309.00071,
    sections 3.1 to 3.3; ``linear``: positions divided by ``factor``; ``proportional``: linear, with
    zeros after the first ``share`` of the frequencies.
    """

    kind: str
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    share: float = 1.0
    growth: float | None = None  # of queries with their position, see ``layers.query_growth``


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts in place of an MLP (Shazeer et al. 2017, arXiv 1701.06538)."""

    count: int  # E, of a layer
    per_token: int  # X
    width: int  # F of one expert
    shared: int = 0  # width of the MLP of shared experts, which every token visits
    shared_gate: bool = False  # its output is multiplied by the sigmoid of one projection
    # ``softmax`` over all experts, or ``sigmoid`` of each with a bias that only affects the choice
    # (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)
    scores: str = "softmax"
    normalise: bool = True  # divide the chosen weights by their sum, before ``scale``
    scale: float = 1.0
    groups: int = 1  # experts come from the best ``groups_chosen`` of equal groups
    groups_chosen: int = 1
    # of the router and of each expert's projections; such files have gpt-oss's layout of experts
    bias: bool = False
    latent: int = 0  # width of what routed experts read and write; 0: the model's
    # layers also have an MLP. The outputs of both have norms before they are added; the router has
    # a norm of its own, and a factor on each expert's weight (Gemma 4)
    with_mlp: bool = False

    @property
    def fused(self) -> bool:
        """True if files and PEFT have the experts of a layer in two tensors only."""
        return self.bias or self.with_mlp


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    q_latent: int  # 0 if queries have no latent
    kv_latent: int
    nope: int  # dimensions of a head's key without rotary position
    rope: int  # and with it, shared by the heads
    value: int  # dimensions of a head's value


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The lightning indexer of sparse attention (DeepSeek-V3.2, section 2.1)."""

    heads: int
    width: int
    topk: int  # number of keys that a query attends to
    interleaved: bool  # rotary pairs are neighbours; otherwise the halves of the head
    # per layer, True if it has an indexer; others reuse the choice of the last layer with one
    full: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class State:
    """Sizes of mixers whose memory is a state in place of keys, see ``models/state.py``."""

    key_heads: int  # of queries and keys; Mamba-2's groups
    heads: int  # of values
    key: int  # dimensions of a key; Mamba-2's state size
    value: int  # dimensions of a value
    taps: int  # of the short convolution

    @property
    def channels(self) -> int:
        """Returns the channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key + self.heads * self.value


@dataclasses.dataclass(frozen=True)
class Delta(State):
    """Gated delta nets (arXiv 2412.06464) in place of attention in some layers."""

    full: tuple[bool, ...]  # per layer, True if it has attention
    # queries, keys, values and gates of a key head are neighbours in one projection, its decays and
    # betas in another (Qwen3-Next)
    joint: bool = False
    # Kimi Delta Attention (arXiv 2510.26692, section 3): a decay for each channel of keys; width of
    # the latents of decays and of gates; 0: neither has one
    latent: int = 0


@dataclasses.dataclass(frozen=True)
class Ssm(State):
    """Mamba-2 (arXiv 2405.21060), which Nemotron-H's state layers are."""

    bias: bool  # of the short convolution
    projection_bias: bool
    step_min: float  # of a token's time step, its factor on keys and on decays


@dataclasses.dataclass(frozen=True)
class Windows:
    """Layers that attend to the last positions only (Mistral, arXiv 2310.06825, section 2)."""

    size: int  # positions of a window, the token's own included
    near: tuple[bool, ...]  # per layer, True if it has the window
    theta: float | None = None  # rotary base of these layers; None: that of the others
    # kv heads and head dim of these layers, whose stacks are then their own; None: as the others
    heads: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class SharedKeys:
    """Last layers without keys: they attend to those of the last layer of their kind before them,
    with a window or without (Gemma 3n and 4).
    """

    layers: int
    d_ff: int  # width of their MLPs


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Embeddings of tokens that each layer adds to its output through a gate (Gemma 3n and 4)."""

    width: int
    vocab_size: int


# Kind of a layer -> its parts, in order, each after a norm and added to the residual stream. Kinds
# with ``near_`` or ``shared_`` in front have the same.
PARTS = {
    **{"dense": ("attn", "mlp"), "moe": ("attn", "moe"), "mlp_moe": ("attn", "mlp", "moe")},
    **{"delta": ("delta", "mlp"), "delta_moe": ("delta", "moe")},
    **{f"only_{part}": (part,) for part in ("ssm", "attn", "mlp", "moe")},
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Dimensions and switches of a decoder, with the axis letters D, F, N, K, H, V, L.

    ``latent`` replaces grouped-query attention, ``experts`` the MLP of all but the first
    ``dense_layers`` layers. ``directory`` is the source checkpoint.
    """

    family: str
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    context: int = 8192
    experts: Experts | None = None
    dense_layers: int = 0
    latent: Latent | None = None
    indexer: Indexer | None = None
    delta: Delta | None = None
    ssm: Ssm | None = None
    # per layer its only part, see ``PARTS``; None: each has a mixer and an MLP
    only: tuple[str, ...] | None = None
    windows: Windows | None = None
    gated_attention: bool = False  # queries come with a gate of attention's output
    rotary: float = 1.0  # share of a head's dimensions with rotary position; 0: no positions
    norm_offset: float = 0.0  # added to the scales of norms
    sinks: bool = False  # heads have a score that only adds to the sum of their weights
    post_norms: bool = False  # norms after attention and after the MLP, too
    embed_scale: float = 1.0
    score_scale: float | None = None  # of attention; None: head_dim ** -0.5
    value_norm: bool = False  # of a head's values, without a scale
    value_is_key: bool = False  # in layers without a window: the key projection, before its norm
    shared_keys: SharedKeys | None = None
    layer_inputs: LayerInputs | None = None
    layer_scale: bool = False  # a factor on each layer's output
    logit_cap: float | None = None  # logits are ``cap * tanh(logits / cap)``
    activation: str = "silu"  # of MLPs and experts, see ``layers.ACTIVATIONS``
    kernels: Kernels = Kernels()
    directory: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def state(self) -> State | None:
        """Sizes of the mixers that have a state; None without such layers."""
        return self.delta or self.ssm

    @property
    def gated(self) -> bool:
        """True if MLPs and experts have a gate, not only ``up``."""
        return self.activation != "relu2"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer, see ``PARTS``: ``near_`` in front has a window, and ``shared_`` no
        keys of its own.
        """
        if self.only is not None:
            return tuple(f"only_{part}" for part in self.only)
        dense = self.num_layers if self.experts is None else self.dense_layers
        sparse = "mlp_moe" if self.experts is not None and self.experts.with_mlp else "moe"
        kinds = ["dense"] * dense + [sparse] * (self.num_layers - dense)
        if self.delta is not None:
            state = {"dense": "delta", "moe": "delta_moe"}
            kinds = [kind if full else state[kind] for kind, full in zip(kinds, self.delta.full)]
        if self.windows is not None:
            near = self.windows.near
            kinds = [f"near_{kind}" if one else kind for kind, one in zip(kinds, near)]
        if self.shared_keys is not None:
            first = self.num_layers - self.shared_keys.layers
            kinds[first:] = [f"shared_{kind}" for kind in kinds[first:]]
        return tuple(kinds)

    @property
    def groups(self) -> tuple[dict[str, range], ...]:
        """Stacks of layers with their layers' numbers, by groups that alternate, in order."""
        return _groups(self.kinds)

    @property
    def stacks(self) -> dict[str, int]:
        """Number of layers of each stack, in the order of their first layers."""
        return {name: len(layers) for group in self.groups for name, layers in group.items()}

    @property
    def routed(self) -> bool:
        """True if any layer has experts; a model with experts may be all dense prefix."""
        return bool(self.routed_layers)

    @property
    def routed_layers(self) -> dict[str, slice]:
        """Places of each stack's layers among all layers with experts, by stack."""
        routed = [i for i, kind in enumerate(self.kinds) if "moe" in kind]
        stacks = (stack for stack in self.stacks if "moe" in self.parts_of(stack))
        return {stack: _places(self.layers_of(stack), routed) for stack in stacks}

    def order_of_routes(self, stacks: Iterable[str]) -> np.ndarray:
        """Returns the permutation that brings routes, stack after stack, into layers' order."""
        layers = self.routed_layers
        places = [np.arange(self.num_layers)[layers[stack]] for stack in stacks]
        return np.argsort(np.concatenate(places))

    def parts_of(self, stack: str) -> tuple[str, ...]:
        """Returns the parts of a stack's layers: a mixer, an MLP, or both."""
        return PARTS[self.kind_of(stack).removeprefix("shared_").removeprefix("near_")]

    def kind_of(self, stack: str) -> str:
        """Returns the kind of a stack's layers."""
        return self.kinds[self.layers_of(stack)[0]]

    def has_state(self, stack: str) -> bool:
        """Returns True if a stack's layers have a state in place of keys."""
        return not {"delta", "ssm"}.isdisjoint(self.parts_of(stack))

    def has_window(self, stack: str) -> bool:
        """Returns True if a stack's layers attend to a window."""
        return "near_" in self.kind_of(stack)

    def has_keys(self, stack: str) -> bool:
        """Returns True if a stack's layers do not read another layer's keys."""
        return not self.kind_of(stack).startswith("shared_")

    def key_stack(self, stack: str) -> str:
        """Returns the stack whose last layer has the keys and values that a stack attends to."""
        kind = self.kind_of(stack).removeprefix("shared_")
        return [one for one in self.stacks if self.kind_of(one) == kind][-1]

    def of_stack(self, stack: str) -> "ModelConfig":
        """Returns the config with the sizes of one stack's layers."""
        own = self.near if self.has_window(stack) else self
        if self.shared_keys is None or self.has_keys(stack):
            return own
        return own.replace(d_ff=self.shared_keys.d_ff)

    @property
    def near(self) -> "ModelConfig":
        """The config with the heads and rotary embedding of layers with a window."""
        assert self.windows is not None
        theta, heads = self.windows.theta, self.windows.heads
        own: dict[str, Any] = {}
        if theta is not None:
            own = {"rope_theta": theta, "rope_scaling": None}
        if heads is not None:
            own |= {"num_kv_heads": heads[0], "head_dim": heads[1], "value_is_key": False}
        return self.replace(**own)

    def layers_of(self, stack: str) -> range:
        """Returns the layers of one stack, numbered through the model."""
        return next(group[stack] for group in self.groups if stack in group)

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head with rotary position."""
        width = self.head_dim if self.latent is None else self.latent.rope
        return int(width * self.rotary)

    def replace(self, **changes: Any) -> "ModelConfig":
        return dataclasses.replace(self, **changes)


def _places(layers: range, among: list[int]) -> slice:
    """Returns the places of layers in a list; a pattern of layers repeats, so they are regular."""
    places = [among.index(layer) for layer in layers]
    step = places[1] - places[0] if len(places) > 1 else 1
    assert places == list(range(places[0], places[-1] + 1, step))
    return slice(places[0], places[-1] + 1, step)


@functools.lru_cache(64)
def _groups(kinds: tuple[str, ...]) -> tuple[dict[str, range], ...]:
    """Splits layers into runs of a repeated pattern, each as long as possible. Each place of a
    pattern is a stack: the kind, with a number from the second stack of a kind on.
    """
    out: list[dict[str, range]] = []
    count = collections.Counter[str]()
    first = 0
    while first < len(kinds):
        rest = kinds[first:]

        def covered(period: int, rest: tuple[str, ...] = rest) -> int:
            repeats = 1
            while rest[repeats * period :][:period] == rest[:period]:
                repeats += 1
            return repeats * period if repeats > 1 or period == 1 else 0

        period = max(range(1, len(rest) + 1), key=lambda period: (covered(period), -period))
        group = {}
        for i, kind in enumerate(rest[:period]):
            name = f"{kind}{count[kind] or ''}"
            group[name] = range(first + i, first + covered(period), period)
            count[kind] += 1
        out.append(group)
        first += covered(period)
    return tuple(out)


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Returns inverse frequencies ``[dim / 2]`` (float64) and the factor on cos and sin."""
    exponent = np.arange(0, dim, 2, dtype=np.float64) / dim
    inv = theta**-exponent
    if scaling is None:
        return inv, 1.0
    if scaling.kind in ("linear", "proportional"):
        turning = np.arange(len(inv)) < int(scaling.share * dim // 2)
        return np.where(turning, inv / scaling.factor, 0.0), 1.0
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / inv
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inv / scaling.factor + smooth * inv, 1.0

    def turns_at(rotations: float) -> float:
        """Returns the dimension that makes this many rotations over the original context."""
        wavelength = scaling.original_context / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = turns_at(scaling.beta_fast), turns_at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / max(high - low, 1e-3), 0.0, 1.0)
    inv = inv / scaling.factor * ramp + inv * (1 - ramp)
    if scaling.attention_factor is not None:
        return inv, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        own, all_ = scaling.mscale, scaling.mscale_all_dim
        return inv, yarn_mscale(scaling.factor, own) / yarn_mscale(scaling.factor, all_)
    return inv, yarn_mscale(scaling.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Returns YaRN's attention temperature, ``0.1 * mscale * ln(factor) + 1`` (section 3.3)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
