"""Training data. A *group* is a prefix and the sequences that continue it, such as a prompt and its
rollouts. A *datum* is the same as arrays: the prefix once, and each sequence as a segment whose
parent is the prefix. A sequence of c target tokens takes c places and begins with the prefix's last
token, so every target is predicted from the place before it.

Axes: P blocks, B rows of a block, T tokens of a row, M target positions of a row or datum, K
targets of a position, Z pairs of a block, N tokens of a datum, L layers, X experts a token.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from mint_jax.errors import UserError
from mint_jax.lora.dropout import Dropout
from mint_jax.train.losses import Targets


@dataclasses.dataclass
class TrainSequence:
    """Target tokens after the group's prefix, with per-token inputs of the loss (see
    ``losses.Tokens``); lists are as long as ``tokens``, None is 0.

    Attributes:
        weights: 0 for tokens that are input only.
        first_logp: filled in by the trainer.
        routes: expert ids that the token before each target visited during sampling, ``[tokens, L,
            X]``; -1 is unknown.
    """

    tokens: list[int]
    weights: list[float]
    advantages: list[float] | None = None
    old_logp: list[float] | None = None
    ref_logp: list[float] | None = None
    first_logp: list[float] | None = None
    routes: np.ndarray | None = None


@dataclasses.dataclass
class Group:
    """A prefix of at least one token, and the sequences that continue it.

    Attributes:
        pair_weight: weight of the DPO pair (chosen, rejected) that the two sequences form; 0 if
            they are not a pair.
        routes: expert ids of the prefix except its last token, ``[prefix - 1, L, X]``.
        temperature: sampling temperature, above 0; log-probabilities are of ``logits /
            temperature``.
    """

    prefix: list[int]
    sequences: list[TrainSequence]
    pair_weight: float = 0.0
    routes: np.ndarray | None = None
    temperature: float = 1.0


class Layout(NamedTuple):
    """Segments of a datum: ``positions``, ``own`` and ``parent`` ``[N]`` int32, where segment 1 is
    the prefix; of each target ``[M]`` int32 the ``index`` of the token that predicts it and the
    number of its ``sequence``; the numbers of segments, and of sequences with targets.
    """

    positions: np.ndarray
    own: np.ndarray
    parent: np.ndarray
    index: np.ndarray
    sequence: np.ndarray
    segments: int
    sequences: int


@dataclasses.dataclass(frozen=True, eq=False)
class Datum:
    """One sequence, or one group, as arrays; inputs of the loss as in ``losses.Targets``.

    Attributes:
        tokens: ``[N]`` int32, input of the model.
        targets: ``[M]`` int32; or ``[M, K]``, K targets of one distribution, for cross-entropy
            only. Without a ``layout``, M is N and position i predicts ``targets[i]``.
        weights: float32 with the shape of ``targets``, of any sign. Targets of weight 0 are scored
            but not trained on.
        advantages, old_logp, in_ratio: ``[M]`` float32, of a sampled datum.
        routes: ``[N, L, X]`` int16, expert ids that each token visited during sampling, -1 for
            none; replayed (R3).
        first_logp: ``[M]``, NaN before the first update; None uses ``old_logp``, so that ratios are
            relative to the sampler.
        ref_logp: ``[M]``, NaN where it is not computed yet.
        layout: None is one sequence.
        temperature: sampling temperature; None is 1.
        pair_weight: weight of a DPO pair; None is no pair.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray | None = None
    old_logp: np.ndarray | None = None
    in_ratio: np.ndarray | None = None
    routes: np.ndarray | None = None
    first_logp: np.ndarray | None = None
    ref_logp: np.ndarray | None = None
    layout: Layout | None = None
    temperature: float | None = None
    pair_weight: float | None = None

    @property
    def width(self) -> int:
        """Number of targets of a position, K."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1


@struct.dataclass
class Batch:
    """Rows of P blocks.

    Attributes:
        tokens, positions, own, parent: ``[P, B, T]`` int32; ``own`` and ``parent`` are segments, 0
            is padding.
        index: ``[P, B, M]`` position in the row whose hidden state predicts the target.
        target: ``[P, B, M]`` token ids; or ``[P, B, M, K]``, where arrays of the loss are ``[P, B,
            M K]``.
        routes: recorded experts to replay, int16 ``[L, P, B, T, X]``, -1 for tokens without; None
            lets the router choose.
        inverse_temperature: of each target's distribution, float32 ``[P, B, M]``; None is 1
            everywhere.
        dropout: of the policies' inputs, before it is folded with their updates; None if no policy
            in training has any.
    """

    tokens: Any
    positions: Any
    own: Any
    parent: Any
    index: Any
    target: Any
    loss: Targets
    routes: Any = None
    inverse_temperature: Any = None
    dropout: Dropout | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (P, B, T, M)."""
        return (*self.tokens.shape, self.index.shape[-1])


def data_of(groups: Sequence[Group], context: int | None = None) -> list[Datum]:
    """Returns one policy's groups as data. If a sequence has recorded experts, tokens without any
    get weight 0. Raises ``UserError`` for no sequences, an empty prefix, a group without two
    sequences among pairs, or a sequence and prefix longer than ``context``.
    """
    if not any(group.sequences for group in groups):
        raise UserError(
            "a policy has no sequences to train on: its dataset or its rollouts are empty"
        )
    is_paired = any(group.pair_weight for group in groups)
    is_routed = any(s.routes is not None for group in groups for s in group.sequences)
    for group in groups:
        _check(group, context, is_paired)
    return [_datum(group, is_paired, is_routed) for group in groups]


def _datum(group: Group, is_paired: bool, is_routed: bool) -> Datum:
    prefix = len(group.prefix) - 1
    lengths = [len(s.tokens) for s in group.sequences]
    weights = [np.asarray(s.weights, np.float32) for s in group.sequences]
    if is_routed:
        weights = [
            np.zeros_like(w) if s.routes is None else w * np.all(s.routes >= 0, axis=(1, 2))
            for s, w in zip(group.sequences, weights)
        ]
    flat = np.concatenate([np.zeros(0, np.float32), *weights])
    chosen = np.flatnonzero(flat)

    def targets_of(name: str, missing: float) -> np.ndarray:
        columns = (getattr(s, name) for s in group.sequences)
        rows = ([missing] * n if x is None else x for x, n in zip(columns, lengths))
        return np.concatenate([np.zeros(0), *rows]).astype(np.float32)[chosen]

    number = np.repeat(np.arange(len(lengths)), lengths)[chosen]
    sequences = len(lengths)
    if not is_paired:  # the loss has as many segments as targets: number those with targets only
        found, number = np.unique(number, return_inverse=True)
        sequences = len(found)
    layout = Layout(
        np.concatenate([np.arange(prefix), *(prefix + np.arange(n) for n in lengths)]),
        np.repeat(np.arange(1, len(lengths) + 2), [prefix, *lengths]),
        np.ones(prefix + sum(lengths), np.int32),
        prefix + chosen,
        number,
        1 + len(lengths),
        sequences,
    )
    inputs = [group.prefix[:-1], *([group.prefix[-1], *s.tokens[:-1]] for s in group.sequences)]
    return Datum(
        np.concatenate(inputs).astype(np.int32),
        np.concatenate([[], *(s.tokens for s in group.sequences)]).astype(np.int32)[chosen],
        flat[chosen],
        targets_of("advantages", 0.0),
        targets_of("old_logp", 0.0),
        routes=_routes(group, prefix, lengths) if is_routed else None,
        first_logp=targets_of("first_logp", np.nan),
        ref_logp=targets_of("ref_logp", np.nan),
        layout=layout,
        temperature=group.temperature,
        pair_weight=group.pair_weight if is_paired else None,
    )


def _routes(group: Group, prefix: int, lengths: Sequence[int]) -> np.ndarray | None:
    parts = [group.routes, *(s.routes for s in group.sequences)]
    if (known := next((part for part in parts[1:] if part is not None), None)) is None:
        return None
    return np.concatenate(
        [
            np.full((n, *known.shape[1:]), -1, np.int16) if part is None else part.astype(np.int16)
            for part, n in zip(parts, [prefix, *lengths])
        ]
    )


def by_sequence(
    group: Group, datum: Datum, values_M: np.ndarray, other: float
) -> Iterator[tuple[TrainSequence, list[float]]]:
    """Yields each sequence of a group with its values, one per token, ``other`` at tokens that are
    not targets.
    """
    assert datum.layout is not None
    prefix = len(group.prefix) - 1
    flat = np.full(datum.tokens.size - prefix, other, np.float32)
    flat[datum.layout.index - prefix] = values_M
    start = 0
    for s in group.sequences:
        yield s, flat[start : start + len(s.tokens)].tolist()
        start += len(s.tokens)


def _check(group: Group, context: int | None, is_paired: bool) -> None:
    if not group.prefix:
        raise UserError(
            "a group has an empty prefix: the first target needs a token before it, such as bos"
        )
    if not 1e-30 <= group.temperature <= 1e30:  # the inverse must fit float32
        raise UserError(
            f"a group was drawn at temperature {group.temperature}; expected 1e-30 to 1e30: greedy"
            " tokens (temperature 0) were not drawn"
        )
    if is_paired and len(group.sequences) != 2:
        raise UserError(
            f"a preference pair has {len(group.sequences)} sequences; expected 2, the chosen and"
            " the rejected answer, in every group of a policy that has pairs"
        )
    for s in group.sequences:
        if not s.tokens or len(s.weights) != len(s.tokens):
            raise UserError(
                f"a sequence has {len(s.tokens)} tokens and {len(s.weights)} weights; expected the"
                " same number, at least 1"
            )
        if context is not None and len(group.prefix) + len(s.tokens) > context:
            raise UserError(
                f"a prompt of {len(group.prefix)} and a continuation of {len(s.tokens)} tokens"
                f" exceed the context of {context}: shorten them or drop the example"
            )
