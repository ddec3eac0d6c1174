"""Training sessions: the right of one writer at a time to change a policy.

Opening a session takes the policy's next number. Writes carry the number and are refused once a
newer session exists, whatever any clock says. Expiry only decides when another owner may open a
session. The same owner may reopen at once, and so may a caller who knows that the
owner has ended: so a restarted job takes its own policy back.
"""

import dataclasses
from typing import Unpack

import sqlalchemy as sa

from mint_jax.catalog.records.aliases import current
from mint_jax.catalog.records.audit import Signed
from mint_jax.catalog.records.handle import Change, Handle
from mint_jax.catalog.records.names import LATEST, duration, full_name, note
from mint_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Session:
    """The right to write a policy, until a newer session of that policy opens."""

    policy: str
    policy_id: int
    number: int
    owner: str
    expires_at: float
    start: int | None  # number of the revision that ``latest`` pointed at when the session opened


def open_session(
    catalog: Handle,
    policy: str,
    owner: str,
    seconds: float = 60.0,
    *,
    instead_of: str | None = None,
    **signed: Unpack[Signed],
) -> Session:
    """Takes the right to write a policy. Raises ``UserError``: another owner's session is open.

    Args:
        owner: the same owner may take its own session over at once.
        seconds: time without ``renew_session`` after which another owner may take over.
        instead_of: take over from owners whose name starts with this and who are known to have
            ended, such as a killed job.
    """
    note("owner", owner, 400)
    if not owner:
        raise UserError("a session needs an owner: name the job")
    duration("length of a session", seconds)

    def body(change: Change) -> Session | UserError:
        row, full, now = change.policy, change.full, change.author.now
        holder = row.session_owner
        ended = instead_of is not None and holder is not None and holder.startswith(instead_of)
        taken = holder not in (None, owner) and now < row.session_expires
        if taken and not ended:
            # If the clock was set back, the holder's expiry can be further off than its session
            # ever lasted: shorten the wait to that length.
            expires = min(row.session_expires, now + row.session_seconds)
            if expires < row.session_expires:
                change.touch(session_expires=expires)
            return UserError(
                f"policy {full!r} is being trained by {holder!r} for {expires - now:.0f} s more:"
                " wait, or close that session"
            )
        latest = current(change.connection, row, LATEST)
        start = None if latest is None else latest.number
        number, expires = row.session_number + 1, now + seconds
        values = {"session_number": number, "session_owner": owner, "session_revision": start}
        values |= {"session_expires": expires, "session_seconds": seconds}
        details = {"session": number, "owner": owner, "seconds": seconds, "fenced": holder}
        change.record("open session", details, **values)
        return Session(full, row.id, number, owner, expires, start)

    opened = catalog.change(policy, body, **signed, active=True)
    if isinstance(opened, UserError):  # returned, so that a shortened wait is committed
        raise opened
    return opened


def renew_session(catalog: Handle, session: Session, seconds: float = 60.0) -> Session:
    """Postpones a session's expiry; the audit log does not record it. Raises ``UserError``: a newer
    session fenced it off.
    """

    def body(change: Change) -> Session:
        check_writer(change.policy, session)
        expires = change.author.now + duration("length of a session", seconds)
        change.touch(session_expires=expires, session_seconds=seconds)
        return dataclasses.replace(session, expires_at=expires)

    return catalog.change(session.policy, body)


def close_session(catalog: Handle, session: Session, **signed: Unpack[Signed]) -> None:
    """Gives the right to write back."""

    def body(change: Change) -> None:
        check_writer(change.policy, session)
        columns = ("session_owner", "session_expires", "session_seconds", "session_revision")
        details = {"session": session.number, "owner": session.owner}
        change.record("close session", details, **dict.fromkeys(columns))

    catalog.change(session.policy, body, **signed)


def check_writer(policy: sa.Row, session: Session | None) -> None:
    """Raises ``UserError`` unless ``session`` may write the policy; None may if no session is
    open.
    """
    full, holder = full_name(policy.tenant, policy.name), policy.session_owner
    if session is None:
        if holder is not None:
            raise UserError(
                f"policy {full!r} is being trained by {holder!r}: write through that session, or"
                " close it first"
            )
        return
    end = "was closed" if holder is None else None
    if session.policy_id != policy.id:
        end = f"is of another policy, {session.policy!r}"  # one deleted since may have its name
    elif session.number != policy.session_number:
        end = f"was fenced off by session {policy.session_number} of {holder!r}"
    if end is not None:
        raise UserError(
            f"session {session.number} of policy {full!r} by {session.owner!r} {end}: stop writing,"
            " or open a new session"
        )
