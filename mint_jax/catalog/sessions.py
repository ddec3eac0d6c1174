"""Training sessions: one writer per policy.

Opening a session gives it the policy's next number; writes carry the number and are refused once a newer session exists,
whatever any clock says. Expiry only decides when another owner may open one without force. The same owner may reopen at
once, and so may one who knows that the owner has ended, which is how a restarted job takes its own policy back.
"""

import sqlalchemy as sa

from mint_jax.catalog import audit, policies
from mint_jax.catalog.aliases import current
from mint_jax.catalog.audit import Author
from mint_jax.catalog.names import LATEST, duration, note
from mint_jax.catalog.records import Session, full_name
from mint_jax.errors import UserError


def start(
    connection: sa.Connection, author: Author, policy: sa.Row, owner: str, seconds: float, force: bool, instead_of: str | None = None
) -> Session | UserError:
    """Opens a session on a locked policy. A refusal is returned, not raised: it may have shortened the wait.

    Where the clock was set back, the holder's expiry can lie further off than its session ever lasted; the wait is then
    cut to that length.
    """
    note("owner", owner, 400)
    if not owner:
        raise UserError("a session needs an owner: name the job")
    duration("length of a session", seconds)
    mine = full_name(policy.tenant, policy.name)
    ended = instead_of is not None and policy.session_owner is not None and policy.session_owner.startswith(instead_of)
    if policy.session_owner not in (None, owner) and author.now < policy.session_expires and not (force or ended):
        expires = min(policy.session_expires, author.now + policy.session_seconds)
        if expires < policy.session_expires:
            policies.touch(connection, author, policy, session_expires=expires)
        return UserError(
            f"policy {mine!r} is being trained by {policy.session_owner!r} for {expires - author.now:.0f} s more: wait, close that "
            "session, or open with force to fence it off"
        )
    latest = current(connection, policy, LATEST)
    number, expires = policy.session_number + 1, author.now + seconds
    began = None if latest is None else latest.number
    policies.touch(
        connection,
        author,
        policy,
        session_number=number,
        session_owner=owner,
        session_expires=expires,
        session_seconds=seconds,
        session_revision=began,
    )
    details = {"session": number, "owner": owner, "seconds": seconds, "fenced": policy.session_owner}
    audit.append(connection, audit.row(author, "open session", policy, details))
    return Session(mine, policy.id, number, owner, expires, began)


def renew(connection: sa.Connection, author: Author, policy: sa.Row, session: Session, seconds: float) -> Session:
    """Moves a session's expiry. A heartbeat is no change of state: the audit log does not record it."""
    check_writer(policy, session)
    duration("length of a session", seconds)
    expires = author.now + seconds
    policies.touch(connection, author, policy, session_expires=expires, session_seconds=seconds)
    return Session(session.policy, policy.id, session.number, session.owner, expires, session.start)


def finish(connection: sa.Connection, author: Author, policy: sa.Row, session: Session) -> None:
    """Closes a session."""
    check_writer(policy, session)
    policies.touch(connection, author, policy, session_owner=None, session_expires=None, session_seconds=None, session_revision=None)
    audit.append(connection, audit.row(author, "close session", policy, {"session": session.number, "owner": session.owner}))


def check_writer(policy: sa.Row, session: Session | None) -> None:
    """Raises unless ``session`` may write the policy; None may where no session is open.

    Raises:
        UserError: it was fenced off by a newer one or closed, or another owner's is open.
    """
    mine = full_name(policy.tenant, policy.name)
    if session is None:
        if policy.session_owner is not None:
            raise UserError(f"policy {mine!r} is being trained by {policy.session_owner!r}: write through that session, or close it first")
    elif session.policy_id != policy.id:
        raise UserError(f"session {session.number} is of policy {session.policy!r}, not of {mine!r}: open one for it")
    elif session.number != policy.session_number or policy.session_owner is None:
        newer = (
            "was closed"
            if session.number == policy.session_number
            else f"was fenced off by session {policy.session_number} of {policy.session_owner!r}"
        )
        raise UserError(f"session {session.number} of policy {mine!r} by {session.owner!r} {newer}: stop writing, or open a new session")
