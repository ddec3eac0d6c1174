"""Chooses the engines to offer a request to, from what engines last reported about themselves.

Pure functions without arrays. Each digest has homes: the first engines of rendezvous hashing
(Thaler and Ravishankar 1998), which depend on the digest and the members only. The first offer goes
to a home or to one of two random engines, whichever starts the request soonest (Mitzenmacher 2001).
An engine far above the mean load is passed over (Mirrokni et al. 2018, arXiv:1608.01350). All other
engines follow, so affinity never refuses a request.
"""

import dataclasses
import functools
import struct
from collections.abc import Collection, Mapping, Sequence
from operator import add, mul
from typing import NamedTuple

from blake3 import blake3

BOUND = 1.25  # times the mean of samples in flight
HOST_SHARE = 0.25  # of a cold load: 9.0 of 36.7 ms in reports/cpu-2-cores/packed_load.json
FRESH_S = 2.0  # age up to which a report is taken as it is
HALF_LIFE_S = 2.0  # of its weight afterwards
_PRIME = (1 << 61) - 1
_PICK = 0x9E3779B97F4A7C15  # odd; its multiples spread consecutive draws over 64 bits


@dataclasses.dataclass(frozen=True)
class Load:
    """An engine's report about itself.

    Attributes:
        at: time of the report, of the clock that ``choose`` gets ``now`` from.
        in_flight: samples admitted and not ended.
        wait_s: seconds until a new sample would start, by the engine's estimate.
        load_s: seconds that a cold load takes there, with the wait for loads ahead if known.
        slots, host: sets of the digests in device slots and in host memory.
        refused_until: time before which it accepts nothing.
    """

    at: float
    in_flight: int = 0
    wait_s: float = 0.0
    load_s: float = 0.05
    slots: Collection[str] = frozenset()
    host: Collection[str] = frozenset()
    refused_until: float = 0.0


class Choice(NamedTuple):
    """An engine, seconds until the request would start there, and one word: ``base``, where the
    digest is (``resident``, ``host``, ``cold`` at a home, ``spill`` elsewhere), or ``refused``.
    """

    engine: str
    eta_s: float
    reason: str


_UNKNOWN = Load(at=float("-inf"))


def choose(
    digest: str | None,
    members: Sequence[str],
    view: Mapping[str, Load],
    now: float,
    replicas: int = 1,
    draw: int = 0,
) -> list[Choice]:
    """Returns all members in the order to offer; those that refuse come last.

    The first is the soonest of the digest's ``replicas + 1`` homes and two engines picked by
    ``draw``, the request's number; the others follow by eta. The eta counts twice where a load
    would add a copy beyond ``replicas``: estimates are noisy, and a copy takes another's place. The
    bare base (``None``) has no homes: the soonest, then the least loaded engine is first. A report
    older than ``FRESH_S`` loses weight to the mean of all; none counts as the mean, with no copies.
    """
    names = tuple(_lines(tuple(members)))
    if not names:
        return []
    # Columns over the members: at 64 engines, each loop of Python statements takes 10 us or more.
    loads = [view.get(name, _UNKNOWN) for name in names]
    flights: list[float] = [load.in_flight for load in loads]
    waits = [load.wait_s for load in loads]
    seconds = [load.load_s for load in loads]
    old = now - FRESH_S
    stale = [i for i, load in enumerate(loads) if load.at < old]
    if doubt := {i: 1.0 - 0.5 ** ((old - loads[i].at) / HALF_LIFE_S) for i in stale}:
        for column in (flights, waits, seconds):
            _blend(column, doubt)
    limit = BOUND * sum(flights) / len(names) + 1  # a nearly idle fleet keeps its copies
    pick = draw * _PICK % (1 << 64)
    start = (pick >> 32) % len(names)

    order = [*range(start, len(names)), *range(start)]  # equals follow in random order
    if digest is None:
        etas, reasons, homes, candidates = waits, ["base"] * len(names), [], order
    else:
        etas, reasons = list(map(add, waits, seconds)), ["spill"] * len(names)
        homes = [names.index(name) for name in homes_of(digest, names, replicas + 1)]
        candidates = [*homes, start, (pick & 0xFFFFFFFF) % len(names)]
        for i in homes:
            reasons[i] = "cold"
        for i in [i for i, x in enumerate(loads) if digest in x.slots or digest in x.host]:
            share = 0.0 if digest in loads[i].slots else HOST_SHARE
            etas[i] = waits[i] + seconds[i] * (share + (1.0 - share) * doubt.get(i, 0.0))
            reasons[i] = "host" if share else "resident"

    def rank(i: int) -> tuple[bool, float, float]:
        adds_copy = reasons[i] in ("cold", "spill") and i not in homes[:replicas]
        return flights[i] > limit, etas[i] * (1 + adds_copy), flights[i]

    refused = {i for i, load in enumerate(loads) if load.refused_until > now}
    accepting = [i for i in candidates if i not in refused] if refused else candidates
    best = min(accepting, key=rank, default=-1)
    for i in refused:
        etas[i], reasons[i] = max(etas[i], loads[i].refused_until - now), "refused"
    order.sort(key=etas.__getitem__)
    if refused:
        order.sort(key=lambda i: loads[i].refused_until if i in refused else 0.0)
    if accepting:
        order.remove(best)
        order.insert(0, best)
    new = tuple.__new__  # in half the time of Choice(...)
    return [new(Choice, (names[i], etas[i], reasons[i])) for i in order]


@functools.lru_cache(1 << 16)
def homes_of(digest: str, members: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Returns the first ``count`` members by rendezvous hashing. A member that joins or leaves
    changes only the homes that it enters or left.
    """
    x = int.from_bytes(blake3(digest.encode()).digest(8)) % _PRIME
    # A member's score is a x + b modulo a prime. Its name gives a and b: scores are uniform, and
    # those of two members independent.
    scores = [((a * x + b) % _PRIME, name) for name, (a, b) in _lines(members).items()]
    return tuple(name for _, name in sorted(scores, reverse=True)[:count])


@functools.lru_cache(64)
def _lines(members: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Returns the numbers a and b of each member, in order of their names."""
    return {n: struct.unpack("<QQ", blake3(n.encode()).digest(16)) for n in sorted(members)}


def _blend(column: list[float], doubt: Mapping[int, float]) -> None:
    """Moves the values of stale reports to the mean, by their ``doubt`` (0 to 1)."""
    weights = [1.0 - doubt.get(i, 0.0) for i in range(len(column))]
    total = sum(weights)
    mean = sum(map(mul, weights, column)) / total if total else column[0]
    for i, share in doubt.items():
        column[i] += share * (mean - column[i])
