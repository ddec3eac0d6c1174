"""Costs of policies and tenants: device seconds, split over the policies that a dispatch served.

The loop measures each dispatch and its tokens by payer. Each token bears the same part of its
dispatch, because all rows of a step wait for the longest, all read the base's weights once, and a
row's own adapter adds little. Padding is borne in the same proportion. An update is split evenly
over its policies. Bringing a policy or a revision to its slot is charged to it alone. The parts of
a dispatch sum to the measured seconds; idle seconds are not charged.
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

    def to_json(self) -> dict[str, float]:
        """Returns the costs and their sums."""
        return dataclasses.asdict(self) | {"seconds": self.seconds, "tokens": self.tokens}


class Costs:
    """Costs since the database was made; may be called from any thread.

    Args:
        book: keeps them.
        policy_of: returns the policy of a revision's digest; called by ``flush``.

    Attributes:
        measured_s: seconds of all dispatches of this process.
    """

    def __init__(self, book: Book, policy_of: Callable[[str], str] = str):
        self._book, self._policy_of = book, policy_of
        self._lock = threading.Lock()  # of the two dicts
        self._writing = threading.Lock()
        self._new: dict[Payer, Cost] = {}  # not in the book yet
        self._tenants: dict[str, Cost] = {}
        self.measured_s = 0.0

    def charge(self, kind: Kind, seconds: float, shares: Mapping[Payer, float]) -> None:
        """Splits a dispatch over its payers by their shares: tokens, for a kind in ``COUNTED``."""
        total, counted = sum(shares.values()), kind in COUNTED
        with self._lock:
            self.measured_s += seconds
            for payer, share in shares.items():
                for cost in (
                    self._new.setdefault(payer, Cost()),
                    self._tenants.setdefault(payer.tenant, Cost()),
                ):
                    fields = cost.__dict__  # three times as fast as setattr, between two dispatches
                    fields[f"{kind}_s"] += seconds * share / total
                    if counted:
                        fields[f"{kind}_tokens"] += int(share)

    def since_start(self) -> dict[str, Cost]:
        """Returns the costs of this process by tenant."""
        with self._lock:
            return {tenant: dataclasses.replace(cost) for tenant, cost in self._tenants.items()}

    def flush(self) -> None:
        """Writes new costs. What cannot be written is tried again by the next call.

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

    def of(self, policies: Sequence[str]) -> dict[str, Cost]:
        """Returns the costs of these policies, of all tenants together."""
        self.flush()
        return {name: Cost() for name in policies} | {
            name: Cost(**sums) for name, sums in self._book.costs_of(policies)
        }

    def listed(
        self, by: str, tenant: str | None = None, limit: int | None = None, offset: int = 0
    ) -> dict[str, Cost]:
        """Returns costs by ``policy`` or ``tenant``, the highest first; of all tenants, or of one.

        A policy is a model's id, ``TENANT/NAME`` in the catalog, the digest of a revision that has
        neither, or ``BASE``.
        """
        self.flush()
        return {name: Cost(**sums) for name, sums in self._book.costs(by, tenant, limit, offset)}
