"""Packing of requests into blocks of declared shapes, for training whose programs are all compiled
in advance.

A *datum* is one sequence with a target at every position, and a segment of its own in a row. A
*block* is some rows of one request; it has the request's loss and its policy's slot. Several blocks
may name one slot; their gradients are summed. Unused blocks are padding and name a slot out of
range. A policy with 64 rows next to seven policies with one therefore costs what its tokens cost.

``train/batch.py`` packs the data of jobs, where rollouts share their prompt and shapes follow from
the data.

Axes: P blocks, B rows, T tokens, N positions of a datum, K targets of a position, X experts a
token, L layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.models.config import ModelConfig
from mint_jax.train.batch import Batch
from mint_jax.train.config import KINDS, KL_KINDS, BlockShape
from mint_jax.train.losses import LossCoefs, Targets


@dataclasses.dataclass(frozen=True, eq=False)
class Datum:
    """One sequence of a request.

    Attributes:
        tokens: ``[N]`` int32, input of the model.
        targets: ``[N]`` int32, position i predicts ``targets[i]``; or ``[N, K]``, K targets of one
            distribution, for cross-entropy only.
        weights: float32 with the shape of ``targets``, of any sign. Targets of weight 0 are scored
            but not trained on.
        advantages, old_logp: ``[N]`` float32, of a sampled datum.
        in_ratio: ``[N]`` float32, 1 for positions in the ratio of the whole sequence (GSPO), else
            0; None uses the positions of non-zero weight.
        routes: ``[N, L, X]`` int16, expert ids that each token visited during sampling, -1 for
            none; replayed (R3).
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray | None = None
    old_logp: np.ndarray | None = None
    in_ratio: np.ndarray | None = None
    routes: np.ndarray | None = None

    @property
    def width(self) -> int:
        """Number of targets of a position, K."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1


def check(data: Sequence[Datum], cfg: ModelConfig, shapes: "Sequence[BlockShape]") -> None:
    """Raises if data cannot be trained on, before anything is computed.

    Args:
        shapes: declared step shapes.

    Raises:
        UserError: names the datum, counted from 0.
    """
    if not data:
        raise UserError("the request has no data: give at least one sequence")
    width = max(datum.width for datum in data)
    fitting = [
        shape.tokens
        for shape in shapes
        if (shape.width > 1) == (width > 1) and shape.width >= width
    ]
    if not fitting:
        widest = max(shape.width for shape in shapes)
        raise UserError(
            f"a datum has {width} targets a position; the steps of this server take at most"
            f" {widest}: keep the most likely ones"
        )
    longest = min(max(fitting), cfg.context)
    for i, datum in enumerate(data):
        what, n = f"datum {i}", datum.tokens.size
        if not n or datum.tokens.ndim != 1:
            raise UserError(
                f"{what} has tokens of shape {datum.tokens.shape}; expected [N], at least one"
            )
        if n > longest:
            raise UserError(
                f"{what} has {n} tokens; this server trains on at most {longest}: shorten it"
            )
        if (
            datum.targets.ndim not in (1, 2)
            or datum.targets.shape[0] != n
            or not datum.targets.size
        ):
            raise UserError(
                f"{what} has {n} tokens and targets of shape {datum.targets.shape}; expected [{n}]"
                f" or [{n}, K]"
            )
        if datum.weights.shape != datum.targets.shape:
            raise UserError(
                f"{what} has targets of shape {datum.targets.shape} and weights of"
                f" {datum.weights.shape}; expected the same"
            )
        for name in ("advantages", "old_logp", "in_ratio"):
            values = getattr(datum, name)
            if values is not None and (values.shape != (n,) or datum.targets.ndim == 2):
                raise UserError(
                    f"{what} has {name} of shape {values.shape}; expected [{n}], with targets of"
                    " the same shape"
                )
        for name, ids in (("tokens", datum.tokens), ("targets", datum.targets)):
            if ids.min() < 0 or ids.max() >= cfg.vocab_size:
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise UserError(
                    f"{what} has {wrong} among its {name}; this base's vocabulary has 0 to"
                    f" {cfg.vocab_size - 1}"
                )
        for name in ("weights", "advantages", "old_logp"):
            values = getattr(datum, name)
            if values is not None and not np.isfinite(values).all():
                raise UserError(f"{what} has {name} that are not finite: send finite numbers")


def check_loss(data: Sequence[Datum], loss: LossCoefs) -> None:
    """Raises if data lack inputs of their loss, or if the loss needs a reference or pairs, which
    live training does not have.

    Raises:
        UserError: names the datum, counted from 0.
    """
    kind = KINDS[int(loss.kind)]
    if kind == "dpo" or int(loss.kl_kind):
        raise UserError(
            f"loss {kind!r} with kl_kind {KL_KINDS[int(loss.kl_kind)]!r} needs pairs or a"
            " reference; live training has neither"
        )
    if kind == "cross_entropy":
        return
    for i, datum in enumerate(data):
        if datum.targets.ndim == 2:
            raise UserError(
                f"datum {i} has {datum.width} targets a position; loss {kind!r} takes one: use"
                " cross_entropy for soft targets"
            )
        for name in ("advantages", "old_logp"):
            if getattr(datum, name) is None:
                raise UserError(
                    f"datum {i} has no {name}; loss {kind!r} needs advantages and old_logp, the"
                    " sampler's log-probabilities"
                )


@dataclasses.dataclass(eq=False)
class TrainRequest:
    """The part of one request that is still to be computed.

    Attributes:
        policy: name of the policy whose adapter is used.
        data: all data of the request.
        coefs: coefficients of its loss.
        backward: add to the policy's gradient; False computes log-probabilities only.
        left: indices of data that no step has processed.
        logprobs: of each datum, in the shape of its targets, once a step has processed it.
        loss: sum so far.
    """

    policy: str
    data: Sequence[Datum]
    coefs: LossCoefs
    backward: bool = True
    left: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    loss: float = 0.0

    def __post_init__(self):
        self.left = list(range(len(self.data)))
        self.logprobs = [None] * len(self.data)

    @property
    def width(self) -> int:
        """Largest number of targets of a position."""
        return max(datum.width for datum in self.data)

    @property
    def routed(self) -> bool:
        return any(datum.routes is not None for datum in self.data)


class DatumBlock(NamedTuple):
    """Rows of one request; each row lists indices of data."""

    work: TrainRequest
    rows: list[list[int]]


def cut(works: Sequence[TrainRequest], shape: BlockShape) -> list[DatumBlock]:
    """Returns blocks of ``shape`` for the remaining data of these requests, which take turns block
    by block in the order given.

    Skips data longer than a row. Does not mark anything as processed.
    """
    waiting = [
        sorted(
            (i for i in w.left if w.data[i].tokens.size <= shape.tokens),
            key=lambda i: -w.data[i].tokens.size,
        )
        for w in works
    ]
    blocks: list[DatumBlock] = []
    while len(blocks) < shape.blocks and any(waiting):
        for work, indices in zip(works, waiting):
            if indices and len(blocks) < shape.blocks:
                blocks.append(DatumBlock(work, _rows(work, indices, shape)))
    return blocks


def _rows(work: TrainRequest, waiting: list[int], shape: BlockShape) -> list[list[int]]:
    """Packs first fit by decreasing size; removes what it places from ``waiting``."""
    rows: list[list[int]] = [[]]
    space = [shape.tokens]
    for i in list(waiting):
        n = work.data[i].tokens.size
        row = next((r for r, free in enumerate(space) if n <= free), None)
        if row is None:
            if len(rows) == shape.rows:
                continue
            rows.append([])
            space.append(shape.tokens)
            row = len(rows) - 1
        rows[row].append(i)
        space[row] -= n
        waiting.remove(i)
    return rows


def used(blocks: Sequence[DatumBlock]) -> int:
    """Returns the number of tokens of these blocks without padding."""
    return sum(
        block.work.data[i].tokens.size for block in blocks for row in block.rows for i in row
    )


class DatumSpan(NamedTuple):
    """Location of a datum: positions of a row from ``start`` on."""

    work: TrainRequest
    datum: int
    block: int
    row: int
    start: int


def fill(blocks: Sequence[DatumBlock], shape: BlockShape) -> tuple[Batch, list[DatumSpan]]:
    """Returns the batch of these blocks, followed by blocks of padding, and the location of each
    datum.

    Data with fewer targets than the shape are padded with targets of weight 0.
    """
    P, B, T, width = shape
    ints = {
        name: np.zeros((P, B, T), np.int32) for name in ("tokens", "positions", "own", "sequence")
    }
    target, weights = np.zeros((P, B, T, width), np.int32), np.zeros((P, B, T, width), np.float32)
    floats = {name: np.zeros((P, B, T), np.float32) for name in ("advantages", "old_logp")}
    in_ratio = np.zeros((P, B, T, width), np.float32)
    routes, places = None, []
    known = next(
        (d.routes for block in blocks for d in block.work.data if d.routes is not None), None
    )
    if known is not None:
        routes = np.full((known.shape[1], P, B, T, known.shape[2]), -1, np.int16)
    for p, block in enumerate(blocks):
        number = 0
        for b, row in enumerate(block.rows):
            start = 0
            for segment, i in enumerate(row, 1):
                datum = block.work.data[i]
                n = datum.tokens.size
                at = np.s_[p, b, start : start + n]
                ints["tokens"][at], ints["positions"][at] = datum.tokens, np.arange(n)
                ints["own"][at], ints["sequence"][at] = segment, number
                target[at][:, : datum.width] = datum.targets.reshape(n, -1)
                weights[at][:, : datum.width] = datum.weights.reshape(n, -1)
                in_ratio[at][:, : datum.width] = (
                    datum.weights != 0 if datum.in_ratio is None else datum.in_ratio
                ).reshape(n, -1)
                for name, array in floats.items():
                    if (values := getattr(datum, name)) is not None:
                        array[at] = values
                if routes is not None and datum.routes is not None:
                    routes[:, p, b, start : start + n] = np.swapaxes(datum.routes, 0, 1)
                places.append(DatumSpan(block.work, i, p, b, start))
                start, number = start + n, number + 1
    sequence = ints.pop("sequence")

    def flat(x: np.ndarray) -> np.ndarray:
        """Repeats ``[P, B, T]`` for every target, to ``[P, B, T K]``."""
        return x if width == 1 else np.repeat(x, width, axis=-1)

    old = flat(floats["old_logp"])
    numbers = (
        weights.reshape(P, B, -1),
        flat(floats["advantages"]),
        old,
        np.zeros_like(old),
        flat(sequence),
        np.zeros((P, 0), np.float32),
    )
    # first_logp is the sampler's, so that every ratio is relative to the sampler, as in the
    # callers' formulas.
    loss = Targets(*numbers, first_logp=old, in_ratio=in_ratio.reshape(P, B, -1))  # type: ignore[arg-type]
    index = np.broadcast_to(np.arange(T, dtype=np.int32), (P, B, T))
    return Batch(
        **ints,  # type: ignore[arg-type]
        parent=ints["own"],  # type: ignore[arg-type]
        index=index,  # type: ignore[arg-type]
        target=target[..., 0] if width == 1 else target,  # type: ignore[arg-type]
        loss=loss,
        routes=routes,  # type: ignore[arg-type]
    ), places


def collect(places: Sequence[DatumSpan], logp: np.ndarray, losses: np.ndarray) -> None:
    """Stores a step's results in its requests, and removes the data from their ``left``.

    Args:
        logp: ``[P, B, T, K]``.
        losses: ``[P]``.
    """
    summed: set[int] = set()
    for place in places:
        work, datum = place.work, place.work.data[place.datum]
        own = logp[
            place.block, place.row, place.start : place.start + datum.tokens.size, : datum.width
        ]
        work.logprobs[place.datum] = own.reshape(datum.targets.shape)
        work.left.remove(place.datum)
        if place.block not in summed:
            summed.add(place.block)
            work.loss += float(losses[place.block])
