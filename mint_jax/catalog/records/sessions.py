"""Rights for a bounded time: of one writer per policy, and of readers to bytes that must not be
removed.

Opening a training session gives it the policy's next number; writes carry the number and are
refused once a newer session exists, whatever any clock says. Expiry only decides when another owner
may open one without force. The same owner may reopen at once, and so may one who knows that the
owner has ended, which is how a restarted job takes its own policy back.

Leases, by which a request or an engine keeps the bytes it uses, come and go with requests and
change what no name stands for, so the audit log does not record them.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import sqlalchemy as sa

from mint_jax.catalog.records import audit, lookup, names
from mint_jax.catalog.records.aliases import current
from mint_jax.catalog.records.audit import Author
from mint_jax.catalog.records.lookup import Lookup
from mint_jax.catalog.records.names import LATEST, duration, full_name, note
from mint_jax.catalog.records.payload_rows import known
from mint_jax.catalog.records.policies import Policies, touch
from mint_jax.catalog.records.tables import leases
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Session:
    """The right to write a policy, until a newer session of that policy opens. ``start``: number of
    the revision it began at.
    """

    policy: str
    policy_id: int
    number: int
    owner: str
    expires_at: float
    start: int | None


@dataclasses.dataclass(frozen=True)
class Lease:
    """Keeps a payload until released or expired."""

    id: int
    digest: str
    owner: str
    expires_at: float


class Sessions(Policies):
    """Gives and takes back the right to write."""

    def open_session(
        self,
        policy: str,
        owner: str,
        seconds: float = 60.0,
        *,
        force: bool = False,
        instead_of: str | None = None,
        by: str | None = None,
        why: str = "",
    ) -> Session:
        """Takes the right to write a policy.

        Args:
            owner: the same owner may take its own session over at once.
            seconds: after so long without ``renew_session`` another owner may take over.
            force: take over from anybody.
            instead_of: take over from owners whose name begins so, who are known to have ended: a
                job that was killed.

        Raises:
            UserError: another owner's session is open.
        """

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> Session | UserError:
            return _start(connection, author, row, owner, seconds, force, instead_of)

        opened = self._change(policy, body, by, why, active=True)
        if isinstance(opened, UserError):
            raise opened
        return opened

    def renew_session(self, session: Session, seconds: float = 60.0) -> Session:
        """Postpones a session's expiry. A heartbeat is no change of state: the audit log does not
        record it.

        Raises:
            UserError: a newer session fenced it off.
        """

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> Session:
            check_writer(row, session)
            expires = author.now + duration("length of a session", seconds)
            touch(connection, author, row, session_expires=expires, session_seconds=seconds)
            return dataclasses.replace(session, expires_at=expires)

        return self._change(session.policy, body)

    def close_session(self, session: Session, *, by: str | None = None, why: str = "") -> None:
        """Gives the right to write back."""

        def body(connection: sa.Connection, author: Author, row: sa.Row) -> None:
            check_writer(row, session)
            touch(
                connection,
                author,
                row,
                session_owner=None,
                session_expires=None,
                session_seconds=None,
                session_revision=None,
            )
            audit.append(
                connection,
                audit.row(
                    author,
                    "close session",
                    row,
                    {"session": session.number, "owner": session.owner},
                ),
            )

        self._change(session.policy, body, by, why)


class Leases(Lookup):
    """Keeps bytes from being removed. A catalog that can only be read notes no lease: there gc's
    grace period is what a reader has.
    """

    def lease(
        self, name: str, owner: str, seconds: float = 60.0, tenant: str | None = None
    ) -> Lease:
        """Keeps the bytes a name stands for now from being removed, until released or expired."""
        if self.database.read_only:
            return self.lease_many([self.resolve(name, tenant).digest], owner, seconds)[0]
        named, author = names.parse_revision(name, tenant), self._author()
        return self.database.write(
            lambda c: _add(c, author, lookup.resolve(c, named, name).digest, owner, seconds)
        )

    def lease_many(self, digests: Sequence[str], owner: str, seconds: float = 60.0) -> list[Lease]:
        """Leases on payloads, in one transaction: all of them or none.

        Raises:
            UserError: a payload was removed.
        """
        author = self._author()
        if self.database.read_only:
            return [Lease(0, digest, owner, author.now + seconds) for digest in digests]
        return self.database.write(
            lambda c: [_add(c, author, digest, owner, seconds) for digest in digests]
        )

    def renew_lease(self, lease: Lease, seconds: float = 60.0) -> Lease:
        """Postpones a lease's expiry.

        Raises:
            UserError: it expired and was removed.
        """
        expires = self._author().now + duration("length of a lease", seconds)
        if self.database.read_only:
            return Lease(0, lease.digest, lease.owner, expires)
        update = leases.update().where(leases.c.id == lease.id).values(expires_at=expires)
        if not self.database.write(lambda c: c.execute(update).rowcount):
            raise UserError(
                f"the lease of {lease.owner!r} on revision {lease.digest[:12]} expired: take a"
                " new one"
            )
        return dataclasses.replace(lease, expires_at=expires)

    def release(self, *held: Lease) -> None:
        """Ends leases, in one transaction; one that ended already is fine."""
        if held and not self.database.read_only:
            ended = leases.delete().where(leases.c.id.in_([lease.id for lease in held]))
            self.database.write(lambda c: c.execute(ended))

    def read_leased(self, lease: Lease, verified: bool = True) -> np.ndarray:
        """The packed object that a lease keeps, as ``load`` gives it; also after its revision was
        retired.

        Args:
            verified: hold the bytes against the digest; off for a caller that does so itself, as
                residency does.
        """
        return self._payload(lease.digest, verified)


def _start(
    connection: sa.Connection,
    author: Author,
    policy: sa.Row,
    owner: str,
    seconds: float,
    force: bool,
    instead_of: str | None = None,
) -> Session | UserError:
    """Opens a session on a locked policy. A refusal is returned, not raised: it may have shortened
    the wait.

    Where the clock was set back, the holder's expiry can lie further off than its session ever
    lasted; the wait is then cut to that length.
    """
    note("owner", owner, 400)
    if not owner:
        raise UserError("a session needs an owner: name the job")
    duration("length of a session", seconds)
    mine = full_name(policy.tenant, policy.name)
    ended = (
        instead_of is not None
        and policy.session_owner is not None
        and policy.session_owner.startswith(instead_of)
    )
    if (
        policy.session_owner not in (None, owner)
        and author.now < policy.session_expires
        and not (force or ended)
    ):
        expires = min(policy.session_expires, author.now + policy.session_seconds)
        if expires < policy.session_expires:
            touch(connection, author, policy, session_expires=expires)
        return UserError(
            f"policy {mine!r} is being trained by {policy.session_owner!r} for"
            f" {expires - author.now:.0f} s more: wait, close that session, or open with force to"
            " fence it off"
        )
    latest = current(connection, policy, LATEST)
    number, expires = policy.session_number + 1, author.now + seconds
    began = None if latest is None else latest.number
    touch(
        connection,
        author,
        policy,
        session_number=number,
        session_owner=owner,
        session_expires=expires,
        session_seconds=seconds,
        session_revision=began,
    )
    details = {
        "session": number,
        "owner": owner,
        "seconds": seconds,
        "fenced": policy.session_owner,
    }
    audit.append(connection, audit.row(author, "open session", policy, details))
    return Session(mine, policy.id, number, owner, expires, began)


def check_writer(policy: sa.Row, session: Session | None) -> None:
    """Raises unless ``session`` may write the policy; None may where no session is open.

    Raises:
        UserError: it was fenced off by a newer one or closed, or another owner's is open.
    """
    mine = full_name(policy.tenant, policy.name)
    if session is None:
        if policy.session_owner is not None:
            raise UserError(
                f"policy {mine!r} is being trained by {policy.session_owner!r}: write through that"
                " session, or close it first"
            )
    elif session.policy_id != policy.id:
        raise UserError(
            f"session {session.number} is of policy {session.policy!r}, not of {mine!r}: open one"
            " for it"
        )
    elif session.number != policy.session_number or policy.session_owner is None:
        newer = (
            "was closed"
            if session.number == policy.session_number
            else f"was fenced off by session {policy.session_number} of {policy.session_owner!r}"
        )
        raise UserError(
            f"session {session.number} of policy {mine!r} by {session.owner!r} {newer}: stop"
            " writing, or open a new session"
        )


def _add(
    connection: sa.Connection, author: Author, digest: str, owner: str, seconds: float
) -> Lease:
    note("owner", owner, 400)
    duration("length of a lease", seconds)
    raw = bytes.fromhex(digest)
    if not known(connection, [raw]):
        raise UserError(
            f"revision {digest[:12]} was removed from the catalog: resolve the name again"
        )
    values = {"digest": raw, "owner": owner, "expires_at": author.now + seconds}
    number = connection.scalar(leases.insert().returning(leases.c.id), values)
    return Lease(number or 0, digest, owner, values["expires_at"])


def remove_expired_leases(connection: sa.Connection, author: Author) -> int:
    """Forgets expired leases."""
    return connection.execute(leases.delete().where(leases.c.expires_at <= author.now)).rowcount
