"""Data of many policies' requests -> blocks of declared shapes, for training whose programs are all
known beforehand.

A *datum* is one sequence with a target at every position. In a row it is a segment of its own, and
rows are filled with data of one request. A *block* is some rows of a request: they have its loss
and its policy's slot. Several blocks may name one slot, whose gradients then add up, and blocks
that nothing is left for are padding: they name a slot that does not exist. So one policy with 64
rows beside seven with one costs what its tokens cost.

``train/batch.py`` packs what a job trains on, where a prompt's rollouts share it and few shapes
follow from the data.

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
        tokens: ``[N]`` int32, which the model reads.
        targets: ``[N]`` int32: position i predicts ``targets[i]``; or ``[N, K]``, several of one
            distribution, for cross-entropy alone.
        weights: float32 like ``targets``; of any sign, 0 for what is no target. Its log-probability
            is told all the same.
        advantages, old_logp: ``[N]`` float32, of a sampled datum.
        in_ratio: ``[N]`` float32, 1 where a position counts in the ratio of the whole sequence
            (GSPO), else 0; None: all of weight other than 0.
        routes: ``[N, L, X]`` int16, the experts that each token visited when it was sampled, -1 for
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
        """K; 1 where a position has one target."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1


def check(data: Sequence[Datum], cfg: ModelConfig, shapes: "Sequence[BlockShape]") -> None:
    """Refuses data that cannot be trained on, before anything is computed.

    Args:
        shapes: of the steps there are.

    Raises:
        UserError: naming the datum, counted from 0.
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
            f"a datum has {width} targets a position; this server's steps have {widest} at most:"
            " keep the likeliest"
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
                f"{what} has {n} tokens; this server trains on {longest} at most: shorten it"
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
                    f"{what} has {name} of shape {values.shape}; expected [{n}], beside targets of"
                    " that shape"
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
                raise UserError(f"{what} has {name} that are not finite: send numbers")


def check_loss(data: Sequence[Datum], loss: LossCoefs) -> None:
    """Refuses data that lack what their loss is computed from, and losses that need a reference or
    pairs, which data have not.

    Raises:
        UserError: naming the datum, counted from 0.
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
class Work:
    """What of one request is still to be computed.

    Attributes:
        policy: whose adapter it is computed with.
        data: all of the request's.
        coefs: its loss, as numbers.
        backward: adds to the policy's gradient; otherwise log-probabilities are all there is.
        left: numbers of the data that no step has taken yet.
        logprobs: of each datum, as its targets are shaped, once a step has taken it.
        loss: the sum so far.
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
        """The most targets that a position has."""
        return max(datum.width for datum in self.data)

    @property
    def routed(self) -> bool:
        return any(datum.routes is not None for datum in self.data)


class Block(NamedTuple):
    """Rows of one request, each the numbers of its data."""

    work: Work
    rows: list[list[int]]


def cut(works: Sequence[Work], shape: BlockShape) -> list[Block]:
    """Blocks of this shape for what is left of these requests, which take turns block by block, in
    the order given.

    Data longer than a row of the shape are passed over. Nothing is marked as taken.
    """
    waiting = [
        sorted(
            (i for i in w.left if w.data[i].tokens.size <= shape.tokens),
            key=lambda i: -w.data[i].tokens.size,
        )
        for w in works
    ]
    blocks: list[Block] = []
    while len(blocks) < shape.blocks and any(waiting):
        for work, mine in zip(works, waiting):
            if mine and len(blocks) < shape.blocks:
                blocks.append(Block(work, _rows(work, mine, shape)))
    return blocks


def _rows(work: Work, waiting: list[int], shape: BlockShape) -> list[list[int]]:
    """First fit by decreasing size; what is placed is taken off ``waiting``."""
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


def used(blocks: Sequence[Block]) -> int:
    """Tokens of these blocks, padding not counted."""
    return sum(
        block.work.data[i].tokens.size for block in blocks for row in block.rows for i in row
    )


class Place(NamedTuple):
    """Where a datum lies: positions ``start`` and on of a row."""

    work: Work
    datum: int
    block: int
    row: int
    start: int


def fill(blocks: Sequence[Block], shape: BlockShape) -> tuple[Batch, list[Place]]:
    """The batch of these blocks, blocks of padding behind them, and where each datum lies in it.

    Data with fewer targets than the shape has get some of weight 0 besides.
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
                places.append(Place(block.work, i, p, b, start))
                start, number = start + n, number + 1
    sequence = ints.pop("sequence")

    def flat(x: np.ndarray) -> np.ndarray:
        """``[P, B, T]``, or that of every target ``[P, B, T K]``."""
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
    # The first update's log-probabilities are the sampler's, so that every ratio is to the sampler,
    # as the callers' losses are written.
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


def collect(places: Sequence[Place], logp: np.ndarray, losses: np.ndarray) -> None:
    """Hands a step's results to its requests, and takes the data off what is left of them.

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
