"""Costs of policies and tenants: device seconds, split over the policies that a dispatch served.

The loop measures each dispatch until its results are on the host, and says which tokens it had of
whom. Each token bears the same part of its dispatch: all rows of a step wait for its longest, all
read the base's weights once, and what a row's own adapter adds is small beside that, so that
nothing that a policy decides itself costs more than its number of tokens. Padding and idle rows are
borne by those who are there, in the same proportion. An update is split over its policies alike,
and what brings a policy or a revision to its slot is that one's alone. The parts of a dispatch sum
to what was measured; seconds in which the devices have nothing to do are nobody's.

    charge      the loop, at each dispatch: additions to a dict
    flush       the server, every few seconds: what was added goes to the book, in one transaction
    by_policy, by_tenant                    all there ever was, since they flush before they read
    since_start                             of this process, by tenant: what Prometheus counts
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from mint_jax.service.book import Book

BASE = "base"  # the bare base, as a policy
KINDS = ("prefill", "decode", "train", "update", "load")
Kind = Literal["prefill", "decode", "train", "update", "load"]
COUNTED = ("prefill", "decode", "train")  # whose shares are tokens


class Payer(NamedTuple):
    """A tenant and the policy it used: a model's id, a revision's digest or ``BASE``."""

    tenant: str
    policy: str


@dataclasses.dataclass
class Cost:
    """Costs of a policy, a tenant, or several.

    Attributes:
        prefill_s, decode_s: seconds of sampling: prompts read, tokens drawn.
        train_s, update_s: of training: forward and backward passes, the optimizer's updates.
        load_s: of revisions and training states on their way to and from slots.
        prefill_tokens, decode_tokens, train_tokens: that these served.
    """

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

    def add(self, other: "Cost") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def told(self) -> dict[str, float]:
        """Returns the costs and their sums as JSON."""
        return dataclasses.asdict(self) | {"seconds": self.seconds, "tokens": self.tokens}


class Costs:
    """See the module; may be called from any thread.

    Args:
        book: keeps them.
        policy_of: the policy that a revision is of, by digest; called by ``flush`` alone.

    Attributes:
        measured_s: what all dispatches of this process took together, as ``charge`` got it.
    """

    def __init__(self, book: Book, policy_of: Callable[[str], str] = str):
        self._book, self._policy_of = book, policy_of
        self._lock = threading.Lock()  # of the two dicts
        self._writing = threading.Lock()
        self._new: dict[Payer, Cost] = {}  # what the book does not have yet
        self._tenants: dict[str, Cost] = {}
        self.measured_s = 0.0

    def charge(self, kind: Kind, seconds: float, shares: Mapping[Payer, float]) -> None:
        """Splits what a dispatch took over its payers, by their shares of it, tokens where the kind
        is in ``COUNTED``.
        """
        total, counted = sum(shares.values()), kind in COUNTED
        with self._lock:
            self.measured_s += seconds
            for payer, share in shares.items():
                mine = seconds * share / total
                for costs, key in ((self._new, payer), (self._tenants, payer.tenant)):
                    if (cost := costs.get(key)) is None:  # type: ignore[call-overload]
                        cost = costs[key] = Cost()  # type: ignore[index]
                    told = cost.__dict__  # three times as fast as setattr, between two dispatches
                    told[f"{kind}_s"] += mine
                    if counted:
                        told[f"{kind}_tokens"] += int(share)

    def since_start(self) -> dict[str, Cost]:
        """By tenant, of this process."""
        with self._lock:
            return {tenant: dataclasses.replace(cost) for tenant, cost in self._tenants.items()}

    def flush(self) -> None:
        """Writes down what is new. What could not be written is tried again with the next.

        Raises:
            DatabaseFailed: the disk refuses.
        """
        with self._writing:
            with self._lock:
                new, self._new = self._new, {}
            if not new:
                return
            try:
                rows: dict[tuple[str, str], Cost] = {}
                for (tenant, policy), cost in new.items():
                    rows.setdefault((tenant, self._policy_of(policy)), Cost()).add(cost)
                self._book.add_costs({key: dataclasses.asdict(cost) for key, cost in rows.items()})
            except BaseException:
                with self._lock:
                    for payer, cost in new.items():
                        self._new.setdefault(payer, Cost()).add(cost)
                raise

    def by_policy(
        self, tenant: str | None = None, limit: int | None = None, offset: int = 0
    ) -> dict[str, Cost]:
        """Of each policy, the dearest first: a model's id, ``TENANT/NAME`` in the catalog, a digest
        of neither, or ``BASE``.

        Args:
            tenant: who asked for it; None: all together.
        """
        return self.listed("policy", tenant, limit, offset)

    def by_tenant(self, limit: int | None = None, offset: int = 0) -> dict[str, Cost]:
        """Of each tenant, the dearest first."""
        return self.listed("tenant", None, limit, offset)

    def of(self, policies: Sequence[str]) -> dict[str, Cost]:
        """Of these policies, of all tenants together."""
        self.flush()
        return {name: Cost() for name in policies} | {
            name: Cost(**sums) for name, sums in self._book.costs_of(policies)
        }

    def listed(
        self, by: str, tenant: str | None, limit: int | None, offset: int
    ) -> dict[str, Cost]:
        """By ``policy`` or ``tenant``, whose costs are written down before they are told."""
        self.flush()
        return {name: Cost(**sums) for name, sums in self._book.costs(by, tenant, limit, offset)}
