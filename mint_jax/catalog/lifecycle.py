"""The catalog: names, revisions, aliases and their history, over a database and a payload store.

    catalog = Catalog.open("runs/catalog")  # or ("postgresql://db/mint", "s3://bucket/payloads")
    revision = catalog.export("chat", packed, step=100, create=True)  # durable on return
    catalog.promote("chat", revision.number, "serving", why="best of the sweep")

Every change is one transaction with its audit entry. Threads and processes may share a catalog.
"""

import time
from collections.abc import Callable
from pathlib import Path

from mint_jax.catalog import cards as _cards
from mint_jax.catalog import gc as _gc
from mint_jax.catalog import merging as _merging
from mint_jax.catalog import verify as _verify
from mint_jax.catalog.records import aliases as _aliases
from mint_jax.catalog.records import canaries as _canaries
from mint_jax.catalog.records import descriptions as _descriptions
from mint_jax.catalog.records import exports, leases, lookup, sessions, training_records
from mint_jax.catalog.records import policies as _policies
from mint_jax.catalog.records import revisions as _revisions
from mint_jax.catalog.records.database import CACHE_BYTES, Database
from mint_jax.catalog.records.handle import Handle
from mint_jax.catalog.storage.payloads import PayloadStore
from mint_jax.errors import UserError


class Catalog(Handle):
    """An open catalog. Its methods are functions of the modules in ``mint_jax/catalog``."""

    create_policy = _policies.create_policy
    policy = _policies.policy
    policies = _policies.list_policies
    keep_last, stand_in = _policies.keep_last, _policies.stand_in
    delete = _policies.delete

    revision, revisions = lookup.revision, lookup.list_revisions
    retire, restore = _revisions.retire, _revisions.restore
    pin, unpin = _revisions.pin, _revisions.unpin
    tag, tags, tags_of = _revisions.tag, _revisions.tags, _revisions.tags_of

    promote, rollback = _aliases.promote, _aliases.rollback
    aliases, aliases_of = _aliases.list_aliases, _aliases.aliases_of
    audit = _aliases.list_audit

    open_canary, end_canary = _canaries.open_canary, _canaries.end_canary
    canary, canaries = _canaries.canary, _canaries.list_canaries
    observe = _canaries.observe

    describe, descriptions = _descriptions.describe, _descriptions.list_descriptions

    export, export_many = exports.export, exports.export_many
    resolve, resolve_many = lookup.resolve, lookup.resolve_many
    holds, load, load_payload = lookup.holds, lookup.load, lookup.load_payload

    open_session = sessions.open_session
    renew_session, close_session = sessions.renew_session, sessions.close_session
    lease, renew_lease, release = leases.lease, leases.renew_lease, leases.release

    checkpoint = training_records.checkpoint
    checkpoints = training_records.list_checkpoints
    rollout, rollouts = training_records.rollout, training_records.list_rollouts
    drop_rollouts = training_records.drop_rollouts
    record_evaluation = training_records.record_evaluation
    evaluations = training_records.list_evaluations

    card = _cards.card
    merge = _merging.merge

    gc, stats = _gc.collect, _gc.stats
    verify = _verify.verify

    @classmethod
    def open(
        cls,
        place: str | Path,
        payloads: str | Path | None = None,
        *,
        actor: str | None = None,
        timeout_s: float = 30.0,
        cache_bytes: int = CACHE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> "Catalog":
        """Opens a catalog, creating it if needed. Raises ``UserError``: database or folder cannot
        be used, or the catalog is of another version.

        Args:
            place: a folder, which holds ``catalog.db`` and ``payloads/``; or a database URL.
            payloads: URL or folder of the payloads; required with a database URL.
            actor: author of the changes where a method's ``by`` is None.
            timeout_s: seconds to wait for a locked or lost database.
            cache_bytes: of database pages that each connection may keep, of an SQLite file.
            clock: seconds since 1970.
        """
        if "://" in str(place):
            if payloads is None:
                raise UserError(
                    f"database {str(place).split('@')[-1]!r} needs a place for the payloads too: a"
                    " folder, s3://… or gs://…"
                )
            url = str(place)
        else:
            folder = Path(place).absolute()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"catalog folder {folder} cannot be made ({error.strerror}): choose a writable"
                    " place"
                ) from None
            url = "sqlite:///" + str(folder / "catalog.db")
            payloads = folder / "payloads" if payloads is None else payloads
        database = Database(url, timeout_s, cache_bytes)
        try:
            return cls(database, PayloadStore(str(payloads)), actor, clock)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Closes the database's connections."""
        self.database.close()

    def __enter__(self) -> "Catalog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
