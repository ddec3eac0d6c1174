"""One thread owns the devices: adapters that have arrived are written into slots, rows decode, at
most one slice of training, again.

Sampling is the engine's, training that of ``training.Training``; both charge what they take to the
same counters, by which tenants get their turns. A slice is the largest whose measured cost is
within a bound, so that rows that decode wait no longer than that for their next tokens. While none
decode the bound is a larger one: a request that arrives then waits for its first token as long as
that.
"""

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from mint_jax.errors import UserError
from mint_jax.residency.residency import Residency
from mint_jax.rollout.engine import Engine
from mint_jax.service.costs import BASE, Costs, Payer
from mint_jax.service.fairness import Counters
from mint_jax.service.training import Training
from mint_jax.train.trainer import Trainer

KEPT_GAPS = 10_000  # of the gaps between two dispatches of rows that decode, the last so many


class Loop:
    """Sampling and training over one base.

    Args:
        engine: samples; not serving yet.
        live: trains; over the same base.
        residency: brings revisions to the engine's slots.
        counters: whose turn it is.
        gap_s: seconds that rows that decode may wait for a slice, where any slice is as short.
        idle_gap_s: the same while none decode.
        commit_bytes: see ``Engine.serving``.
        costs: told what each dispatch took, and for whom.

    Attributes:
        training: takes requests from any thread while the loop runs.
        gaps: seconds from the end of one dispatch of rows to the beginning of the next where rows
            were there in between.

    Raises:
        UserError: bounds that are not above 0; engine and live training over different bases.
    """

    def __init__(
        self,
        engine: Engine,
        live: Trainer,
        residency: Residency | None = None,
        counters: Counters | None = None,
        gap_s: float = 0.5,
        idle_gap_s: float = 2.0,
        commit_bytes: int | None = None,
        costs: Costs | None = None,
    ):
        if not 0 < gap_s <= idle_gap_s:
            raise UserError(
                f"gap_s is {gap_s} and idle_gap_s {idle_gap_s}; expected seconds above 0, the"
                " second not below the first"
            )
        if engine.base is not live.base:
            raise UserError(
                "the engine's base is another than that of live training: make both over one"
            )
        self.engine, self.residency, self.counters = engine, residency, counters or Counters()
        self.gap_s, self.idle_gap_s, self.commit_bytes = gap_s, idle_gap_s, commit_bytes
        self.costs = costs
        self.training = Training(live, self.counters, engine.wake, costs)
        self.gaps: collections.deque[float] = collections.deque(maxlen=KEPT_GAPS)

    @contextlib.contextmanager
    def running(self) -> Iterator["Loop"]:
        """Runs the loop in a thread of its own until the block ends; training requests that have
        not ended then are refused.
        """
        try:
            with self.engine.serving(
                residency=self.residency, commit_bytes=self.commit_bytes, coscheduled=self
            ):
                yield self
        finally:
            self.training.close(
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
        if self.costs is not None:
            self.costs.charge(
                kind,
                seconds,
                {
                    Payer(tenant, digest or BASE): count
                    for (tenant, digest), count in tokens.items()
                },
            )
