"""Packing of requests into blocks of rows. A *block* is some rows of one request, with its loss and
its policy's slot; unused blocks are padding in a slot out of range. With declared shapes (``cut``)
every program is compiled in advance, and a request is computed part by part. Otherwise (``passes``,
``fit``) each policy has one block in a pass, as large as its data.

Axes: P blocks, B rows, T tokens, M targets of a row, K targets of a position, Z pairs, N positions
of a datum.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mint_jax.data.buckets import ShapeBook, round_up
from mint_jax.errors import UserError
from mint_jax.lora import dropout as dropout_lib
from mint_jax.lora.dropout import Dropout
from mint_jax.models.config import ModelConfig
from mint_jax.train.batch import Batch, Datum, Layout
from mint_jax.train.config import BlockShape
from mint_jax.train.losses import LossCoefs, Targets

LEAST = (1, 16, 8, 1)  # minimum B, T, M and Z of shapes that follow from the data


def check(data: Sequence[Datum], cfg: ModelConfig, shapes: Sequence[BlockShape]) -> None:
    """Raises ``UserError`` for a datum that steps of these declared shapes cannot train on."""
    if not data:
        raise UserError("the request has no data: give at least one sequence")
    width = max(datum.width for datum in data)
    alike = (shape for shape in shapes if (shape.width > 1) == (width > 1))
    fitting = [shape.tokens for shape in alike if shape.width >= width]
    if not fitting:
        widest = max(shape.width for shape in shapes)
        raise UserError(
            f"a datum has {width} targets a position; the steps of this server take at most"
            f" {widest}: keep the most likely ones"
        )
    longest = min(max(fitting), cfg.context)
    for i, datum in enumerate(data):
        what, n = f"datum {i}", datum.tokens.size
        if not 1 <= n <= longest:
            raise UserError(
                f"{what} has {n} tokens; this server trains on at most {longest}: send"
                f" 1 to {longest}"
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


@dataclasses.dataclass(eq=False)
class TrainRequest:
    """One request and its results so far.

    Attributes:
        backward: add to the policy's gradient; False computes log-probabilities only.
        dropout, seed: of the policy, see ``PolicyConfig``.
        left: indices of data that no step has processed.
        logprobs: of each datum, in the shape of its targets.
        totals: metrics of its loss, summed; ``max_gap`` is a maximum.
    """

    policy: str
    data: Sequence[Datum]
    coefs: LossCoefs
    backward: bool = True
    left: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    totals: dict[str, float] = dataclasses.field(default_factory=dict)
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self.left = list(range(len(self.data)))
        self.logprobs = [None] * len(self.data)

    @property
    def loss(self) -> float:
        return self.totals.get("loss", 0.0)

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

    @property
    def data(self) -> list[Datum]:
        return [self.work.data[i] for row in self.rows for i in row]


class DatumSpan(NamedTuple):
    """Location of a datum's targets: those of a row from ``start`` on."""

    work: TrainRequest
    datum: int
    block: int
    row: int
    start: int


def cut(works: Sequence[TrainRequest], shape: BlockShape) -> list[DatumBlock]:
    """Returns blocks of ``shape`` for the remaining data of these requests, which take turns; skips
    data longer than a row.
    """
    waiting = [[i for i in w.left if w.data[i].tokens.size <= shape.tokens] for w in works]
    blocks: list[DatumBlock] = []
    while len(blocks) < shape.blocks and any(waiting):
        for work, indices in zip(works, waiting):
            if indices and len(blocks) < shape.blocks:
                rows = _rows(work.data, indices, shape.tokens, shape.rows)
                indices[:] = [i for i in indices if not any(i in row for row in rows)]
                blocks.append(DatumBlock(work, rows))
    return blocks


def passes(works: Sequence[TrainRequest], max_tokens: int) -> Iterator[list[DatumBlock]]:
    """Yields blocks of all data, of at most ``max_tokens`` padded tokens if single data fit."""
    # A request without room waits for a later pass: with every policy in every pass, each pass
    # would compute and add up the gradients of all. The number of policies in a pass is a power of
    # two, so that varying lengths need few programs.
    room = max_tokens // max(_padded_tokens(work.data, work.left) for work in works)
    together = len(works) if room >= len(works) else 1 << max(0, room.bit_length() - 1)
    for first in range(0, len(works), together):
        queues = [(work, list(work.left)) for work in works[first : first + together]]
        budget = max(1, max_tokens // len(queues))
        while any(waiting for _, waiting in queues):
            taken: list[tuple[TrainRequest, list[int]]] = []
            for work, waiting in queues:
                if not waiting:  # policies with less data skip the later passes
                    continue
                some = [waiting.pop(0)]
                while waiting and _padded_tokens(work.data, [*some, waiting[0]]) <= budget:
                    some.append(waiting.pop(0))
                taken.append((work, some))
            capacity = max(_capacity(work.data, some) for work, some in taken)
            yield [DatumBlock(work, _rows(work.data, some, capacity)) for work, some in taken]


def _capacity(data: Sequence[Datum], indices: Sequence[int]) -> int:
    """Returns the row length that holds each of these data."""
    # Rounded up, so that short ones share a row: otherwise 256 groups of 4 tokens took 256 rows of
    # 16 and four times as long.
    return round_up(max(data[i].tokens.size for i in indices), LEAST[1])


def _padded_tokens(data: Sequence[Datum], indices: Sequence[int]) -> int:
    capacity = _capacity(data, indices)
    return len(_rows(data, indices, capacity)) * capacity


def _rows(
    data: Sequence[Datum], indices: Sequence[int], capacity: int, most: int | None = None
) -> list[list[int]]:
    """Packs data into at most ``most`` rows, first fit by decreasing size."""
    rows: list[list[int]] = []
    space: list[int] = []
    for i in sorted(indices, key=lambda i: -data[i].tokens.size):
        n = data[i].tokens.size
        row = next((r for r, free in enumerate(space) if n <= free), None)
        if row is None:
            if len(rows) == most:
                continue
            row = len(rows)
            rows.append([])
            space.append(capacity)
        rows[row].append(i)
        space[row] -= n
    return rows


def used(blocks: Sequence[DatumBlock]) -> int:
    """Returns the number of tokens of these blocks without padding."""
    return sum(datum.tokens.size for block in blocks for datum in block.data)


class Fitted(NamedTuple):
    """Shape of a batch: M target positions of a row (0: one a token), and Z pairs of a block."""

    shape: BlockShape
    targets: int
    pairs: int


def fit(blocks: Sequence[DatumBlock], book: ShapeBook, row_multiple: int = 1) -> Fitted:
    """Returns the smallest shape of ``book`` for these blocks, of a multiple of ``row_multiple``
    rows.
    """
    rows = [[block.work.data[i] for i in row] for block in blocks for row in block.rows]
    pairs = max(sum(d.pair_weight is not None for d in block.data) for block in blocks)
    needed = (
        -(-max(len(block.rows) for block in blocks) // row_multiple),
        max(sum(datum.tokens.size for datum in row) for row in rows),
        max(sum(len(datum.targets) for datum in row) for row in rows),
        *([pairs] if pairs else []),
    )
    B, T, M, *Z = book.fit(needed, LEAST[: len(needed)])
    return Fitted(BlockShape(len(blocks), B * row_multiple, T), M, Z[0] if Z else 0)


def fill(
    blocks: Sequence[DatumBlock],
    shape: BlockShape,
    targets: int = 0,
    pairs: int = 0,
    drops: bool = False,
) -> tuple[Batch, list[DatumSpan]]:
    """Returns the batch of these blocks, followed by blocks of padding, and the location of each
    datum. ``targets`` and ``pairs`` as in ``Fitted``; padding has weight 0. With ``drops`` the
    batch has the requests' dropout.
    """
    P, B, T, K = shape
    M = targets or T
    tokens, positions, own, parent = (np.zeros((P, B, T), np.int32) for _ in range(4))
    index = np.zeros((P, B, M), np.int32)
    target, sequence = (np.zeros((P, B, M, K), np.int32) for _ in range(2))
    names = ("weights", "advantages", "old_logp", "ref_logp", "first_logp", "in_ratio")
    floats = {name: np.zeros((P, B, M, K), np.float32) for name in names}
    pair_weights = np.zeros((P, pairs), np.float32)
    every = [datum for block in blocks for datum in block.work.data]
    routes = sharp = dropout = None
    if drops:
        dropout = Dropout(np.zeros(P, np.float32), np.zeros((P, B, T), np.uint32))
    if (known := next((d.routes for d in every if d.routes is not None), None)) is not None:
        routes = np.full((known.shape[1], P, B, T, known.shape[2]), -1, np.int16)
    if any(datum.temperature is not None for datum in every):
        sharp = np.ones((P, B, M), np.float32)
    spans = []
    for p, block in enumerate(blocks):
        numbers = paired = 0
        if dropout is not None:
            dropout.rate[p] = block.work.dropout
        for b, row in enumerate(block.rows):
            start = first = segments = 0
            for i in row:
                datum = block.work.data[i]
                n, m = datum.tokens.size, len(datum.targets)
                at, to = np.s_[p, b, start : start + n], np.s_[p, b, first : first + m]
                layout = datum.layout or _single(n)
                tokens[at], positions[at] = datum.tokens, layout.positions
                own[at], parent[at] = segments + layout.own, segments + layout.parent
                index[to] = start + layout.index
                sequence[to] = numbers + layout.sequence[:, None]
                target[to][:, : datum.width] = _columns(datum.targets)
                for name, values in _loss_inputs(datum).items():
                    if values is not None:
                        width = datum.width if name in ("weights", "in_ratio") else K
                        floats[name][to][:, :width] = _columns(values)
                if dropout is not None:
                    own_seed = block.work.seed
                    dropout.number[at] = dropout_lib.numbers(own_seed, i, datum.tokens)
                if routes is not None and datum.routes is not None:
                    routes[:, p, b, start : start + n] = np.swapaxes(datum.routes, 0, 1)
                if sharp is not None and datum.temperature is not None:
                    sharp[to] = 1.0 / datum.temperature
                if datum.pair_weight is not None:
                    pair_weights[p, paired] = datum.pair_weight
                    paired += 1
                spans.append(DatumSpan(block.work, i, p, b, first))
                start, first = start + n, first + m
                segments, numbers = segments + layout.segments, numbers + layout.sequences
    flat = {name: array.reshape(P, B, -1) for name, array in floats.items()}
    loss = Targets(**flat, sequence=sequence.reshape(P, B, -1), pair_weights=pair_weights)
    target = target[..., 0] if K == 1 else target
    return Batch(tokens, positions, own, parent, index, target, loss, routes, sharp, dropout), spans


def _single(n: int) -> Layout:
    """Returns the layout of one sequence."""
    places, ones = np.arange(n), np.ones(n, np.int32)
    return Layout(places, ones, ones, places, np.zeros(n, np.int32), 1, 1)


def _columns(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 2 else x[:, None]


def _loss_inputs(datum: Datum) -> Mapping[str, np.ndarray | None]:
    """Returns a datum's arrays of ``Targets``; None is 0."""
    ref, first, counted = datum.ref_logp, datum.first_logp, datum.in_ratio
    return {
        "weights": datum.weights,
        "advantages": datum.advantages,
        "old_logp": datum.old_logp,
        "ref_logp": None if ref is None else np.nan_to_num(ref, posinf=np.inf, neginf=-np.inf),
        "first_logp": datum.old_logp if first is None else first,
        "in_ratio": (datum.weights != 0).astype(np.float32) if counted is None else counted,
    }


def collect(
    spans: Sequence[DatumSpan], logp: np.ndarray, metrics: Mapping[str, np.ndarray]
) -> None:
    """Stores a step's results in its requests, and removes the data from their ``left``.

    Args:
        logp: ``[P, B, M, K]``.
        metrics: ``[P]`` each, of the blocks.
    """
    for block, work in {span.block: span.work for span in spans}.items():
        for name, values in metrics.items():
            old, new = work.totals.get(name, 0.0), float(values[block])
            work.totals[name] = max(old, new) if name == "max_gap" else old + new
    for work, i, block, row, start in spans:
        datum = work.data[i]
        own = logp[block, row, start : start + len(datum.targets), : datum.width]
        work.logprobs[i] = own.reshape(datum.targets.shape)
        work.left.remove(i)
