"""Chooses the engines to offer a request to, from what engines last reported about themselves.

Pure functions without arrays. Each digest has homes: the first engines of rendezvous hashing
(Thaler and Ravishankar 1998), which depend on the digest and the members only. The first offer goes
to a home or to one of two random engines, whichever starts the request soonest (Mitzenmacher 2001).
An engine far above the mean load is passed over (Mirrokni et al. 2018, arXiv:1608.01350). All other
engines follow, so affinity never refuses a request.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import mul
from typing import NamedTuple

from blake3 import blake3

from mint_jax.residency.loads import HOST_SHARE

BOUND = 1.25  # times the mean of samples in flight
FRESH_S = 2.0  # age up to which a report is taken as it is
HALF_LIFE_S = 2.0  # of its weight afterwards
_PRIME = (1 << 30) - 35  # CPython multiplies and sorts numbers of 30 bits fastest
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
) -> Iterator[Choice]:
    """Yields all members in the order to offer; those that refuse come last.

    The first is the soonest of the digest's ``replicas + 1`` homes and two engines picked by
    ``draw``, the request's number; the others follow by eta. The eta counts twice where a load
    would add a copy beyond ``replicas``: estimates are noisy, and a copy takes another's place. The
    bare base (``None``) has no homes: the soonest, then the least loaded engine is first. A report
    older than ``FRESH_S`` loses weight to the mean of all; none counts as the mean, with no copies.
    """
    if not (names := tuple(_lines(tuple(members)))):
        return
    # Columns over the members: at 64 engines, each loop of Python statements takes 10 us or more.
    loads = [view.get(name, _UNKNOWN) for name in names]
    flights: list[float] = [load.in_flight for load in loads]
    waits = [load.wait_s for load in loads]
    seconds = [load.load_s for load in loads]
    old, trust = now - FRESH_S, [1.0] * len(names)
    if min(times := [load.at for load in loads]) < old:
        trust = [1.0 if at >= old else math.exp2((at - old) / HALF_LIFE_S) for at in times]
        flights, waits, seconds = _blended((flights, waits, seconds), trust)
    limit = BOUND * sum(flights) / len(names) + 1  # a nearly idle fleet keeps its copies
    pick = draw * _PICK % (1 << 64)
    start = (pick >> 32) % len(names)
    order = [*range(start, len(names)), *range(start)]  # equals follow in random order
    homes = [names.index(name) for name in homes_of(digest, names, replicas + 1)] if digest else []

    def choice(i: int) -> Choice:
        load, share, reason = loads[i], 1.0, "cold" if i in homes else "spill"
        if digest is None:
            share, reason = 0.0, "base"
        elif digest in load.slots:
            share, reason = 1.0 - trust[i], "resident"
        elif digest in load.host:
            share, reason = 1.0 - (1.0 - HOST_SHARE) * trust[i], "host"
        eta_s = waits[i] + seconds[i] * share
        if load.refused_until > now:
            eta_s, reason = max(eta_s, load.refused_until - now), "refused"
        return Choice(names[i], eta_s, reason)

    def rank(i: int) -> tuple[bool, bool, float, float]:
        _, eta_s, reason = choice(i)
        adds_copy = reason in ("cold", "spill") and i not in homes[:replicas]
        return reason == "refused", flights[i] > limit, eta_s * (1 + adds_copy), flights[i]

    if digest is None:  # ``rank`` of each, as columns
        refused = [load.refused_until > now for load in loads]
        full = [flight > limit for flight in flights]
        ranks = list(zip(refused, full, waits, flights, strict=True))
        best = min(order, key=ranks.__getitem__)
    else:
        best = min([*homes, start, (pick & 0xFFFFFFFF) % len(names)], key=rank)
    if loads[best].refused_until <= now:
        yield choice(best)
        order.remove(best)
    rest = [(loads[i].refused_until if loads[i].refused_until > now else 0.0, i) for i in order]
    choices = [(until, choice(i)) for until, i in rest]
    choices.sort(key=lambda one: (one[0], one[1].eta_s))
    yield from (one for _, one in choices)


@functools.lru_cache(1 << 13)  # of 10^6 names a front remembers these
def homes_of(digest: str, members: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Returns the first ``count`` members by rendezvous hashing. A member that joins or leaves
    changes only the homes that it enters or left.
    """
    x = int.from_bytes(blake3(digest.encode()).digest(8)) % _PRIME
    # A member's score is a x + b modulo a prime. Its name gives a and b: scores are uniform, and
    # those of two members independent.
    names, lines = zip(*_lines(members).items(), strict=True)
    scores = [(a * x + b) % _PRIME for a, b in lines]
    best = sorted(range(len(names)), key=scores.__getitem__, reverse=True)
    return tuple(names[i] for i in best[:count])


@functools.lru_cache(64)
def _lines(members: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Returns the numbers a and b of each member, in order of their names."""
    digests = {name: blake3(name.encode()).digest(16) for name in sorted(members)}
    return {
        name: (int.from_bytes(digest[:8]) % _PRIME, int.from_bytes(digest[8:]) % _PRIME)
        for name, digest in digests.items()
    }


def _blended(columns: Sequence[list[float]], trust: Sequence[float]) -> list[list[float]]:
    """Returns columns with the values of stale reports moved to the mean, by ``trust`` (1 to 0)."""
    total, out = sum(trust), []
    for column in columns:
        mean = sum(map(mul, trust, column)) / total if total else column[0]
        out.append([mean + share * (x - mean) for x, share in zip(column, trust)])
    return out
