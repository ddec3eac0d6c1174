"""Costs of policies and tenants: device seconds, split over the policies that a dispatch served.

Each token bears the same part of its dispatch: all rows of a step wait for the longest, all read
the base's weights once, and a row's own adapter adds little. An update is split evenly over its
policies; bringing a policy or a revision to its slot is charged to it alone. The parts of a
dispatch sum to the measured seconds, padding included; idle seconds are not charged.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from mint_jax.rollout.witness import BASE  # noqa: F401 the bare base, as a policy
from mint_jax.service.server_db import Connection, ServerDatabase

Kind = Literal["prefill", "decode", "train", "update", "load"]
KINDS: tuple[Kind, ...] = get_args(Kind)
COUNTED = ("prefill", "decode", "train")  # kinds with shares in tokens


class Payer(NamedTuple):
    """A tenant and the policy it used: a model's id, a revision's digest or ``BASE``."""

    tenant: str
    policy: str


@dataclasses.dataclass
class Cost:
    """Device seconds by kind of work, and the tokens of the first three."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    train_s: float = 0.0
    update_s: float = 0.0
    load_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    train_tokens: int = 0

    @property
    def seconds(self) -> float:
        return sum(getattr(self, f"{kind}_s") for kind in KINDS)

    @property
    def tokens(self) -> int:
        return sum(getattr(self, f"{kind}_tokens") for kind in COUNTED)

    def to_json(self) -> dict[str, float]:
        """Returns the costs and their sums."""
        return dataclasses.asdict(self) | {"seconds": self.seconds, "tokens": self.tokens}


FIELDS = tuple(field.name for field in dataclasses.fields(Cost))
TOKENS = FIELDS[len(KINDS) :]  # in the order of ``COUNTED``
HOUR_S, KEPT_H = 3600, 60 * 24


class Costs:
    """Costs since the database was made, thread-safe; ``policy_of``: a digest's policy; ``clock``
    returns seconds since 1970.
    """

    def __init__(
        self,
        database: ServerDatabase,
        policy_of: Callable[[str], str] = str,
        clock: Callable[[], float] = time.time,
    ):
        self._database, self._policy_of, self._clock = database, policy_of, clock
        self._lock = threading.Lock()  # of the two dicts
        self._writing = threading.Lock()
        self._new: dict[Payer, Cost] = {}  # not in the database yet
        self._tenants: dict[str, Cost] = {}
        self.measured_s = 0.0

    def charge(self, kind: Kind, seconds: float, shares: Mapping[Payer, float]) -> None:
        """Splits a dispatch over its payers by their shares: tokens, for a kind in ``COUNTED``."""
        total = sum(shares.values())
        with self._lock:
            self.measured_s += seconds
            for payer, share in shares.items():
                added = {f"{kind}_s": seconds * share / total}
                if kind in COUNTED:
                    added[f"{kind}_tokens"] = int(share)
                _add(self._new.setdefault(payer, Cost()), added)
                _add(self._tenants.setdefault(payer.tenant, Cost()), added)

    def since_start(self) -> dict[str, Cost]:
        """Returns the costs of this process by tenant."""
        with self._lock:
            return {tenant: dataclasses.replace(cost) for tenant, cost in self._tenants.items()}

    def flush(self) -> None:
        """Writes new costs. What cannot be written is tried again by the next call."""
        sets = ", ".join(f"{name} = {name} + excluded.{name}" for name in FIELDS)
        query = f"INSERT INTO costs VALUES (?, ?{', ?' * len(FIELDS)})"
        query += f" ON CONFLICT DO UPDATE SET {sets}"
        sets = ", ".join(f"{name} = {name} + excluded.{name}" for name in TOKENS)
        hourly = f"INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET {sets}"

        def write(connection: Connection) -> None:
            connection.executemany(query, rows)
            connection.executemany(hourly, used)
            connection.execute("DELETE FROM usage WHERE hour < ?", (hour - KEPT_H,))

        with self._writing:
            with self._lock:
                new, self._new = self._new, {}
            if not new:
                return
            try:
                rows = [
                    (tenant, self._policy_of(policy), *dataclasses.astuple(cost))
                    for (tenant, policy), cost in new.items()
                ]
                hour = int(self._clock() // HOUR_S)
                used = [
                    (tenant, hour, policy, *tokens)
                    for tenant, policy, *costs in rows
                    if any(tokens := costs[len(KINDS) :])
                ]
                self._database.write(write).result()
            except BaseException:
                with self._lock:
                    for payer, cost in new.items():
                        _add(self._new.setdefault(payer, Cost()), vars(cost))
                raise

    def hourly(self, tenant: str, first: int, last: int) -> list[tuple[int, str, list[int]]]:
        """Returns hours since 1970, policies and tokens by ``COUNTED``, from ``first`` and before
        ``last``; what is not flushed yet counts for the hour of this call.
        """
        self.flush()
        where = "tenant = ? AND hour >= ? AND hour < ? ORDER BY hour, policy"
        query = f"SELECT hour, policy, {', '.join(TOKENS)} FROM usage WHERE {where}"
        rows = self._database.read(query, tenant, first, last)
        return [(hour, policy, tokens) for hour, policy, *tokens in rows]

    def _sums(self, by: str, rest: str, *values: Any) -> dict[str, Cost]:
        self.flush()
        sums = ", ".join(f"SUM({name})" for name in FIELDS)
        rows = self._database.read(f"SELECT {by}, {sums} FROM costs {rest}", *values)
        return {name: Cost(*sums) for name, *sums in rows}

    def of(self, policies: Sequence[str]) -> dict[str, Cost]:
        """Returns the costs of at most some hundred policies, of all tenants together."""
        where = f"WHERE policy IN ({', '.join('?' * len(policies))}) GROUP BY policy"
        return {name: Cost() for name in policies} | self._sums("policy", where, *policies)

    def listed(
        self, by: str, tenant: str | None = None, limit: int = -1, offset: int = 0
    ) -> dict[str, Cost]:
        """Returns costs by ``policy`` or ``tenant``, highest first; of all tenants, or of one."""
        seconds = " + ".join(f"SUM({kind}_s)" for kind in KINDS)
        rest = f"WHERE ?1 IS NULL OR tenant = ?1 GROUP BY {by} ORDER BY {seconds} DESC, {by}"
        return self._sums(by, f"{rest} LIMIT ?2 OFFSET ?3", tenant, limit, offset)


def _add(cost: Cost, added: Mapping[str, float]) -> None:
    fields = vars(cost)  # three times as fast as setattr, between two dispatches
    for name, value in added.items():
        fields[name] += value
