"""Loop of the thread that owns the devices: writes arrived adapters into slots, decodes rows, runs
at most one slice of training, and repeats.

The engine samples and ``Durable`` trains; both charge the same counters, which order the tenants. A
slice is the largest whose measured cost is within a bound, so that decoding rows wait no longer
than that for their next tokens. The bound is larger while no row decodes; it then delays the first
token of a new request.
"""

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from mint_jax.errors import UserError
from mint_jax.residency.residency import Residency
from mint_jax.rollout.engine import Engine
from mint_jax.service.costs import BASE, Payer
from mint_jax.service.durable import Durable

KEPT_GAPS = 10_000  # the last gaps between two dispatches of decoding rows


class Loop:
    """Sampling and training over one base.

    Args:
        engine: not serving yet.
        training: over the same base.
        gap_s: maximum seconds that decoding rows wait for a slice, unless the shortest is longer.
        idle_gap_s: the same while no row decodes.
        commit_bytes: see ``Engine.serving``.

    Attributes:
        gaps: seconds that decoding rows waited for slices.

    Raises:
        UserError: a bound is not above 0, or engine and live training have different bases.
    """

    def __init__(
        self,
        engine: Engine,
        training: Durable,
        residency: Residency | None = None,
        gap_s: float = 0.5,
        idle_gap_s: float = 2.0,
        commit_bytes: int | None = None,
    ):
        if not 0 < gap_s <= idle_gap_s:
            raise UserError(
                f"gap_s is {gap_s} and idle_gap_s {idle_gap_s}; expected seconds above 0, the"
                " second not below the first"
            )
        if engine.base is not training.live.base:
            raise UserError(
                "the engine's base is another than that of live training: make both over one"
            )
        self.engine, self.training, self.residency = engine, training, residency
        self.counters, self.costs = training.counters, training.costs
        self.gap_s, self.idle_gap_s, self.commit_bytes = gap_s, idle_gap_s, commit_bytes
        self.gaps: collections.deque[float] = collections.deque(maxlen=KEPT_GAPS)

    @contextlib.contextmanager
    def running(self) -> Iterator["Loop"]:
        """Runs the loop in another thread until the block ends."""
        try:
            with self.engine.serving(
                residency=self.residency, commit_bytes=self.commit_bytes, coscheduled=self
            ):
                yield self
        finally:
            self.training.stop(
                UserError("the server was stopped before this request ended: ask again")
            )

    # -- what the engine asks (rollout.engine.Beside)

    @property
    def waiting(self) -> int:
        return self.training.waiting

    def turn(self, decoding: bool) -> bool:
        began = time.perf_counter()
        worked = self.training.turn(self.gap_s if decoding else self.idle_gap_s)
        if worked and decoding:
            self.gaps.append(time.perf_counter() - began)
        return worked

    def began(self, tenant: str) -> None:
        self.counters.begin(tenant)

    def ended(self, tenant: str) -> None:
        self.counters.end(tenant)

    def order(self, tenants: Iterable[str]) -> list[str]:
        return self.counters.order(tenants)

    def spent(self, seconds: float, tokens: Mapping[str, float]) -> None:
        self.counters.charge(seconds, tokens)

    def took(
        self,
        kind: Literal["prefill", "decode"],
        seconds: float,
        tokens: Mapping[tuple[str, str | None], int],
    ) -> None:
        shares = {Payer(tenant, digest or BASE): n for (tenant, digest), n in tokens.items()}
        self.costs.charge(kind, seconds, shares)
