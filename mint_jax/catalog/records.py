"""What the catalog returns: one frozen record per concept of the service.

Digests are 64 hex digits, times are seconds since 1970, and ``policy`` is the full name, ``name`` or ``tenant/name``.
"""

import dataclasses
from typing import Any

from mint_jax.catalog.payloads import Place


@dataclasses.dataclass(frozen=True)
class PolicyRecord:
    """A trained behaviour over a base, by name.

    Attributes:
        base: fingerprint of the base.
        schema: JSON text of the schema its revisions have.
        parent: the revision it branched from, ``policy@number``.
        state: ``active`` or ``retired``.
        keep_last: how many of the newest revisions retention keeps; None keeps all.
        revisions: revisions made so far, also those that retention removed: the last one's number.
        session_owner: who trains it now.
    """

    id: int
    tenant: str
    name: str
    base: str
    schema: str
    parent: str | None
    state: str
    keep_last: int | None
    created_at: float
    touched_at: float
    revisions: int
    session_number: int
    session_owner: str | None
    session_expires: float | None

    @property
    def policy(self) -> str:
        return full_name(self.tenant, self.name)


@dataclasses.dataclass(frozen=True)
class Revision:
    """An immutable export of a policy's adapter.

    Attributes:
        bytes: length of the packed object.
        state: ``live`` or ``retired``.
        sampling: how training drew the rollouts, as ``rollout.engine.Request`` names it; None where it drew none or it is unknown.
    """

    id: int
    policy: str
    number: int
    step: int
    digest: str
    bytes: int
    origin: str
    pinned: bool
    state: str
    created_at: float
    sampling: dict[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a name stands for now, and where its bytes are.

    Attributes:
        finite: all weights are, found when the bytes came in; False also where that was not checked.
    """

    policy: str
    number: int
    digest: str
    place: Place
    schema: str
    revision_id: int
    finite: bool


@dataclasses.dataclass(frozen=True)
class Alias:
    """A movable name of one revision of a policy. ``version`` counts its moves."""

    policy: str
    name: str
    number: int
    digest: str
    version: int
    updated_at: float


@dataclasses.dataclass(frozen=True)
class AuditEntry:
    """One state change. ``id`` orders all of them, whatever the clocks said; ``before`` and ``after`` are revision numbers."""

    id: int
    at: float
    actor: str
    why: str
    action: str
    policy: str | None
    alias: str | None
    before: int | None
    after: int | None
    version: int | None
    details: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Session:
    """The right to write a policy, until a newer session of that policy opens. ``start``: number of the revision it began at."""

    policy: str
    policy_id: int
    number: int
    owner: str
    expires_at: float
    start: int | None


@dataclasses.dataclass(frozen=True)
class TrainingCheckpoint:
    """Where the state that resumes training lies."""

    id: int
    policy: str
    step: int
    place: str
    created_at: float


@dataclasses.dataclass(frozen=True)
class RolloutRecord:
    """A stored batch of rollouts; ``digest`` names its object, which records the revision of every token."""

    id: int
    policy: str
    step: int
    digest: str
    tokens: int
    mean_reward: float
    created_at: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A score and everything that produced it. ``policy`` and ``number`` are None once retention removed the revision."""

    id: int
    policy: str | None
    number: int | None
    digest: str
    base: str
    renderer: str
    scorer: str
    dataset: str
    seed: int
    metrics: dict[str, Any]
    isolated: float
    shared: float
    created_at: float


@dataclasses.dataclass(frozen=True)
class Operation:
    """One client call. ``state``: ``running``, ``done`` (with ``result``) or ``failed`` (with ``error``)."""

    id: str
    tenant: str
    kind: str
    key: str
    state: str
    request: Any
    result: Any
    error: str | None
    created_at: float
    finished_at: float | None


@dataclasses.dataclass(frozen=True)
class Lease:
    """Keeps a payload until released or expired."""

    id: int
    digest: str
    owner: str
    expires_at: float


def full_name(tenant: str, name: str) -> str:
    """``name`` for the default tenant, ``tenant/name`` for others."""
    return name if tenant == "default" else f"{tenant}/{name}"
