"""Packing of many policies' sequences into one padded batch.

A *group* is a prefix and the sequences that continue it: a prompt and its rollouts, a prompt with a
chosen and a rejected answer, or a text with an empty prompt. A row stores the prefix once; each
sequence is a segment whose parent is the prefix segment. A sequence of c target tokens takes c
places and begins with the prefix's last token, so that every target is predicted from the place
before it. Only target positions reach the unembedding.

Axes: P policies, B rows of a policy, T tokens of a row, M target positions of a row, Z pairs of a
policy.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from flax import struct

from mint_jax.data.buckets import ShapeBook, round_up
from mint_jax.errors import UserError
from mint_jax.train.losses import Targets

LEAST = (1, 16, 8, 1)  # minimum B, T, M and Z


@dataclasses.dataclass
class TrainSequence:
    """Target tokens with per-token inputs of the loss; lists are as long as ``tokens``.

    Attributes:
        tokens: the continuation of the group's prefix.
        weights: 0 for tokens that are input only.
        advantages, old_logp, ref_logp: None is 0.
        first_logp: the trainer's log-probabilities before the first update on these tokens; the
            trainer fills this in.
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


@struct.dataclass
class Batch:
    """Rows of P policies.

    Attributes:
        tokens, positions, own, parent: ``[P, B, T]`` int32; ``own`` and ``parent`` are segments, 0
            is padding.
        index: ``[P, B, M]`` position in the row whose hidden state predicts the target.
        target: ``[P, B, M]`` token ids; or ``[P, B, M, K]`` for K targets of one distribution, in
            which case arrays of the loss are ``[P, B, M K]``.
        routes: recorded experts to replay, int16 ``[L, P, B, T, X]``, -1 for tokens without; None
            lets the router choose.
        loss: inputs of the loss, ``[P, B, M]`` and ``[P, Z]``.
        inverse_temperature: of each target's distribution, float32 ``[P, B, M]``; None is 1
            everywhere.
    """

    tokens: jax.Array
    positions: jax.Array
    own: jax.Array
    parent: jax.Array
    index: jax.Array
    target: jax.Array
    loss: Targets
    routes: jax.Array | None = None
    inverse_temperature: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (P, B, T, M)."""
        return (*self.tokens.shape, self.index.shape[-1])  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class TargetSpan:
    """Location of a sequence's targets: ``batch.index[policy, row, start : start + count]``."""

    policy: int
    row: int
    start: int
    count: int


@dataclasses.dataclass
class _Row:
    # (group, [(sequence number, sequence)])
    pieces: list[tuple[Group, list[tuple[int, TrainSequence]]]]
    tokens: int
    targets: int


def cost(group: Group) -> int:
    """Returns the number of tokens that a group takes in a row."""
    return len(group.prefix) - 1 + sum(len(s.tokens) for s in group.sequences)


def padded_tokens(groups: Sequence[Group]) -> int:
    """Returns the padded tokens of one policy's rows if they are as long as its largest group."""
    capacity = _capacity(groups)
    return len(_rows(groups, capacity)) * capacity


def _capacity(groups: Iterable[Group]) -> int:
    """Returns the row length that holds every group, rounded up to a padded size so that short
    groups share a row.
    """
    # Without rounding, 256 groups of 4 tokens took 256 rows of 16 and four times as long.
    return round_up(max(map(cost, groups)), LEAST[1])


def pack(
    policies: Sequence[Sequence[Group]],
    shapes: ShapeBook,
    row_tokens: int | None = None,
    context: int | None = None,
    row_multiple: int = 1,
) -> tuple[Batch, list[list[TargetSpan]]]:
    """Packs each policy's groups into rows, first fit by decreasing size.

    Args:
        shapes: rounds (B, T, M, Z) to few values.
        row_tokens: row length; None is that of the largest group, rounded up. A larger group is
            split, with its prefix repeated.
        context: maximum length of prefix and sequence.
        row_multiple: number of rows of a policy is a multiple of this (the data axes of a mesh).

    Returns:
        The batch, and per policy the location of each sequence in input order.

    Raises:
        UserError: no sequences, an empty prefix, a group without two sequences in a policy with
            pairs, or a sequence longer than ``context``.
    """
    if not policies or any(not any(g.sequences for g in groups) for groups in policies):
        raise UserError(
            "a policy has no sequences to train on: its dataset or its rollouts are empty"
        )
    for groups in policies:
        paired = any(g.pair_weight for g in groups)
        for group in groups:
            _check(group, context, paired)
    longest = max(
        len(g.prefix) - 1 + len(s.tokens)
        for groups in policies
        for g in groups
        for s in g.sequences
    )
    capacity = max(longest, row_tokens or _capacity(g for groups in policies for g in groups))
    packed = [_rows(groups, capacity) for groups in policies]
    pairs = [
        [g.pair_weight for g in groups] if any(g.pair_weight for g in groups) else []
        for groups in policies
    ]
    most = max(len(rows) for rows in packed)
    needed = (
        -(-most // row_multiple),
        max(row.tokens for rows in packed for row in rows),
        max(row.targets for rows in packed for row in rows),
        max(map(len, pairs)),
    )
    if needed[3]:
        rows_m, T, M, Z = shapes.fit(needed, least=LEAST)
    else:
        (rows_m, T, M), Z = shapes.fit(needed[:3], least=LEAST[:3]), 0
    return _fill(packed, (len(policies), rows_m * row_multiple, T, M, Z), pairs)


def _check(group: Group, context: int | None, paired: bool) -> None:
    if not group.prefix:
        raise UserError(
            "a group has an empty prefix: the first target needs a token before it, such as bos"
        )
    if not 1e-30 <= group.temperature <= 1e30:  # the inverse must fit float32
        raise UserError(
            f"a group was drawn at temperature {group.temperature}; expected 1e-30 to 1e30: greedy"
            " tokens (temperature 0) were not drawn"
        )
    if paired and len(group.sequences) != 2:
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


def _rows(groups: Sequence[Group], capacity: int) -> list[_Row]:
    pieces, number = [], 0
    for group in groups:
        members: list[tuple[int, TrainSequence]] = []
        used = len(group.prefix) - 1
        for s in group.sequences:
            if members and used + len(s.tokens) > capacity:
                pieces.append((group, members, used))
                members, used = [], len(group.prefix) - 1
            members.append((number, s))
            used += len(s.tokens)
            number += 1
        if members:
            pieces.append((group, members, used))
    rows: list[_Row] = []
    for group, members, used in sorted(pieces, key=lambda p: -p[2]):
        targets = sum(int(np.count_nonzero(s.weights)) for _, s in members)
        row = next((r for r in rows if r.tokens + used <= capacity), None)
        if row is None:
            row = _Row([], 0, 0)
            rows.append(row)
        row.pieces.append((group, members))
        row.tokens += used
        row.targets += targets
    return rows


def _fill(
    packed: list[list[_Row]], shape: tuple[int, int, int, int, int], pairs: list[list[float]]
) -> tuple[Batch, list[list[TargetSpan]]]:
    P, B, T, M, Z = shape
    ints = {
        name: np.zeros((P, B, T), np.int32) for name in ("tokens", "positions", "own", "parent")
    }
    index, target, sequence = (np.zeros((P, B, M), np.int32) for _ in range(3))
    floats = {
        name: np.zeros((P, B, M), np.float32)
        for name in ("weights", "advantages", "old_logp", "ref_logp", "first_logp")
    }
    sharp = np.ones((P, B, M), np.float32)
    weights_PZ = np.zeros((P, Z), np.float32)
    routes = _no_routes(packed, (P, B, T))
    places: list[list[TargetSpan]] = []
    for p, rows in enumerate(packed):
        found: dict[int, TargetSpan] = {}
        scored = 0
        for b, row in enumerate(rows):
            at, out, segment = 0, 0, 0
            for group, members in row.pieces:
                prefix = group.prefix
                segment += 1
                shared = segment
                span = slice(at, at + len(prefix) - 1)
                ints["tokens"][p, b, span] = prefix[:-1]
                ints["positions"][p, b, span] = np.arange(len(prefix) - 1)
                ints["own"][p, b, span] = ints["parent"][p, b, span] = shared
                if routes is not None and group.routes is not None:
                    routes[:, p, b, span] = np.swapaxes(group.routes, 0, 1)
                at = span.stop
                for number, s in members:
                    segment += 1
                    span = slice(at, at + len(s.tokens))
                    ints["tokens"][p, b, span] = [prefix[-1], *s.tokens[:-1]]
                    ints["positions"][p, b, span] = len(prefix) - 1 + np.arange(len(s.tokens))
                    ints["own"][p, b, span] = segment
                    ints["parent"][p, b, span] = shared
                    if routes is not None and s.routes is not None:
                        routes[:, p, b, span] = np.swapaxes(s.routes, 0, 1)
                    chosen = np.flatnonzero(s.weights)
                    to = slice(out, out + len(chosen))
                    index[p, b, to] = at + chosen
                    target[p, b, to] = np.asarray(s.tokens)[chosen]
                    # Pairs are numbered by their place in the batch. Other sequences are numbered
                    # among those with targets, since the loss has as many segments as targets.
                    sequence[p, b, to] = number if pairs[p] else scored
                    scored += len(chosen) > 0
                    for name, array in floats.items():
                        values = getattr(s, name)
                        if values is not None:
                            array[p, b, to] = np.asarray(values)[chosen]
                    if s.first_logp is None:
                        floats["first_logp"][p, b, to] = np.nan
                    sharp[p, b, to] = 1.0 / group.temperature
                    found[number] = TargetSpan(p, b, to.start, len(chosen))
                    at, out = span.stop, to.stop
        places.append([found[i] for i in sorted(found)])
        weights_PZ[p, : len(pairs[p])] = pairs[p]
    loss = Targets(**floats, sequence=sequence, pair_weights=weights_PZ)  # type: ignore[arg-type]
    return Batch(
        **ints,  # type: ignore[arg-type]
        index=index,  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
        loss=loss,
        routes=routes,  # type: ignore[arg-type]
        inverse_temperature=sharp,  # type: ignore[arg-type]
    ), places


def _no_routes(packed: list[list[_Row]], rows: tuple[int, int, int]) -> np.ndarray | None:
    """Returns an array for the routes of a batch, filled with -1; None if no sequence has any."""
    sequences = (
        s for policy in packed for row in policy for _, members in row.pieces for _, s in members
    )
    known = next((s.routes for s in sequences if s.routes is not None), None)
    return None if known is None else np.full((known.shape[1], *rows, known.shape[2]), -1, np.int16)


def mask_unrouted(groups: Sequence[Group]) -> tuple[list[Group], int]:
    """Removes tokens without recorded experts from the loss, if other tokens of the policy have
    them.

    Returns:
        The groups, and the number of masked targets.
    """
    if not any(s.routes is not None for g in groups for s in g.sequences):
        return list(groups), 0
    masked = 0

    def routed_only(s: TrainSequence) -> TrainSequence:
        nonlocal masked
        known = (
            [False] * len(s.tokens)
            if s.routes is None
            else np.all(s.routes >= 0, axis=(1, 2)).tolist()
        )
        weights = [w if k else 0.0 for w, k in zip(s.weights, known)]
        masked += sum(1 for old, new in zip(s.weights, weights) if old and not new)
        return dataclasses.replace(s, weights=weights)

    return [
        dataclasses.replace(g, sequences=[routed_only(s) for s in g.sequences]) for g in groups
    ], masked
