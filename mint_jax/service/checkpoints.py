"""Checkpoints of policies in training, by the paths that Tinker gives them: ``tinker://<model>/<kind>/<name>``.

    weights             the state without pending gradients, a file named by its digest
    sampler_weights     the adapter, a revision of the catalog's policy that is called as the model is
    external_weights    the adapter as PEFT has it, for other engines: see ``external.py``

A sampler's weights are a revision too, whether they have a name or not: what is sampled never changes, and is found after a restart.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mint_jax import files
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, as_bytes, digest_of, pack
from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.revisions import Revision
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.service import external
from mint_jax.service.book import Book, Checkpoint, NotFound
from mint_jax.service.calls import Load, Save
from mint_jax.train.held import Held

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}  # and what Tinker calls their types
SNAPSHOTS_S = 86400.0
SHORTEST_S, LONGEST_S = 3600, 10 * 366 * 86400  # of a time to live


class Path_(NamedTuple):
    """The parts of a checkpoint's path."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def parse(path: str) -> Path_:
    """A path's parts.

    Raises:
        UserError: it is none.
    """
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise UserError(f"path is {path[:200]!r}; expected {SCHEME}MODEL/KIND/NAME with a kind of {', '.join(KINDS)}")
    return Path_(*parts)


def is_digest(text: str) -> bool:
    """Whether a text is a revision's whole digest."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def check_name(name: Any) -> str:
    """A checkpoint's name as a segment of its path.

    Raises:
        UserError: it is none.
    """
    if not isinstance(name, str) or not name or "\\" in name or "?" in name or "#" in name:
        raise UserError(f"a checkpoint's name is {str(name)[:80]!r}; expected one segment of a path, as in step-100")
    return names.clean("a checkpoint's name", name)


def check_ttl(seconds: Any) -> int | None:
    """A time to live.

    Raises:
        UserError: it is no whole number of seconds in its range.
    """
    if seconds is None:
        return None
    if type(seconds) is not int or not SHORTEST_S <= seconds <= LONGEST_S:
        raise UserError(f"ttl_seconds is {str(seconds)[:40]}; expected {SHORTEST_S} to {LONGEST_S}, or none for ever")
    return seconds


class Checkpoints:
    """The checkpoints of one server.

    Args:
        folder: of those that are files.
        book: their rows.
        catalog: of revisions.
        base: that all are of.
        offer: (digest, packed bytes, tenant) of weights that are about to be sampled, told before they are written: their way to the
            device does not wait for the disk.
        need_room: (tenant, bytes more) -> refuses what is beyond a quota.

    Attributes:
        naming: held while a name is looked at and given.
        writing: the models of revisions that the catalog does not have yet, by digest.
    """

    def __init__(
        self,
        folder: Path,
        book: Book,
        catalog: Catalog,
        base: Base,
        offer: Callable[[str, np.ndarray, str], Any] | None = None,
        need_room: Callable[[str, int], None] = lambda tenant, more: None,
    ):
        self.folder, self.book, self.catalog, self.base, self.need_room = folder, book, catalog, base, need_room
        self._offer = offer
        self.specs = transformer.abstract(base.cfg)
        self.naming = threading.Lock()
        self.writing: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    # -- what training asks for: see ``durable.Store``

    def save(self, model: str, request: str, call: Save, held: Held) -> dict[str, Any]:
        """Keeps a state; what the client hears.

        Raises:
            UserError: the name is taken, weights to be sampled are not finite, or the tenant has no room for them.
        """
        tenant = self.book.owner(model)
        if call.name is None:
            return self._keep(model, tenant, request, call, held)
        with self.naming:  # two saves of one model may be written at once
            if not call.overwrite:
                self.book.need_free(model, call.kind, call.name, request)
            self.need_room(tenant, held.nbytes - self._replaced(model, call.kind, call.name))
            return self._keep(model, tenant, request, call, held)

    def _replaced(self, model: str, kind: str, name: str) -> int:
        """Bytes of what has a name now."""
        try:
            return self.book.checkpoint(self.book.owner(model), model, kind, name).nbytes
        except NotFound:
            return 0

    def _keep(self, model: str, tenant: str, request: str, call: Save, held: Held) -> dict[str, Any]:
        if call.kind == "weights":
            data = held.to_bytes()
            digest, nbytes = blake3_of(data), len(data)
            files.write_file(self._file(digest), data)
        elif call.kind == "sampler_weights":
            digest, nbytes = self._export(tenant, model, held, soon=call.sampler is not None)
        else:
            digest, nbytes = external.write(self.folder / "external", held, self.base, self.specs, call.recipients)
        if call.sampler is not None:
            session, number = call.sampler.rsplit(":sample:", 1)
            return {"sampling_session_id": self.book.add_sampler(session, int(number), tenant, None, digest).id}
        now = self.book.clock()
        told = {"config": dataclasses.asdict(held.config), "base": self.base.fingerprint, "metadata": call.metadata}
        expires = None if call.ttl_s is None else now + call.ttl_s
        row = Checkpoint(model, call.kind, call.name or "", tenant, digest, nbytes, request, told, now, expires, False)
        if (old := self.book.add_checkpoint(row)) is not None and old.digest != digest:
            self._forget_bytes(old)
        return {"path": row.path}

    def _export(self, tenant: str, model: str, held: Held, soon: bool) -> tuple[str, int]:
        """The adapter as a revision: its digest and bytes. ``soon``: it is going to be sampled at once."""
        config = lora_tree.spelled_out(held.config, self.specs)
        data = as_bytes(pack(held.adapter(), Schema(self.base.fingerprint, config)))
        digest = digest_of(data)
        self.writing[digest] = model
        try:
            if soon and self._offer is not None:
                self._offer(digest, data, tenant)
            return self.catalog.export(f"{tenant}/{model}", data, held.steps, create=True, by="service").digest, data.nbytes
        finally:
            self.writing.pop(digest, None)

    def load(self, call: Load) -> Held:
        """The state that a path names, with its moments or without.

        Raises:
            UserError: there is none, it is no training state, or of another base.
        """
        path = parse(call.path)
        if path.kind != "weights":
            raise UserError(
                f"{call.path} are weights to sample from; training goes on from tinker://MODEL/weights/NAME, which save_state makes"
            )
        row = self.book.checkpoint(call.tenant, *path, published=True)
        if row.told["base"] != self.base.fingerprint:
            raise UserError(
                f"{call.path} is of base {row.told['base'][:12]}, this is {self.base.fingerprint[:12]}: load it where its own is"
            )
        data = self._file(row.digest).read_bytes()
        if blake3_of(data) != row.digest:
            raise UserError(f"{call.path} is damaged: its digest is not {row.digest}; load another checkpoint")
        held = Held.from_bytes(data, call.path)
        return held if call.optimizer else held.fresh()

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.safetensors"

    # -- what is sampled

    def fetch(self, digest: str) -> np.ndarray:
        """A revision's packed bytes, for residency."""
        return self.catalog.load(digest)

    def digest(self, tenant: str, path: str) -> str:
        """Of the weights that a path names.

        Raises:
            NotFound, UserError: there are none; they are not for sampling.
        """
        where = parse(path)
        if where.kind != "sampler_weights":
            raise UserError(f"{path[:200]} cannot be sampled; save_weights_for_sampler makes paths that can")
        return self.book.checkpoint(tenant, *where, published=True).digest

    # -- what REST asks for

    def config(self, row: Checkpoint) -> AdapterConfig:
        fields = row.told["config"]
        return AdapterConfig(**fields | {"targets": tuple(fields["targets"])})

    def copy(self, tenant: str, source: str, model: str, request: str, ttl_s: int | None) -> str:
        """The path of a copy that belongs to another model; bytes are shared."""
        row = self.book.checkpoint(tenant, *parse(source), published=True)
        now = self.book.clock()
        expires = None if ttl_s is None else now + ttl_s
        self.book.need_free(model, row.kind, row.name, request)
        self.need_room(tenant, 0 if row.tenant == tenant else row.nbytes)
        made = dataclasses.replace(row, model=model, tenant=tenant, request=request, created=now, expires=expires, public=False)
        self.book.add_checkpoint(made)
        return made.path

    def remove(self, row: Checkpoint) -> None:
        """Ends a checkpoint."""
        self.book.remove_checkpoint(row)
        self._forget_bytes(row)

    def _forget_bytes(self, row: Checkpoint) -> None:
        """Lets a checkpoint's bytes go that nobody else has."""
        if not self.book.unused(row.digest):
            return
        if row.kind == "weights":
            self._file(row.digest).unlink(missing_ok=True)
        elif row.kind == "external_weights":
            external.remove(self.folder / "external", row.digest)
        else:
            self._retire(row.told.get("policy") or f"{row.tenant}/{row.model}", {row.digest}, "its checkpoint was deleted")

    def _retire(self, policy: str, digests: Collection[str], why: str) -> None:
        """Takes revisions out of use, but for those that a person gave an alias, and the last that a policy has."""
        named = {alias.number for alias in self.catalog.aliases(policy) if alias.name != names.LATEST}
        live = [revision for revision in self._revisions(policy) if revision.state == "live"]
        going = [revision.number for revision in live if revision.digest in digests and revision.number not in named]
        staying = sorted({revision.number for revision in live} - set(going)) or [going.pop()] if going else []
        if going:
            self.catalog.promote(policy, staying[-1], names.LATEST, by="service", why=why)
        for number in going:
            self.catalog.retire(policy, number, by="service", why=why)

    def _revisions(self, policy: str) -> Iterator[Revision]:
        page = self.catalog.revisions(policy)
        while page:
            yield from page
            page = self.catalog.revisions(policy, after=page[-1].number)

    def expire(self) -> int:
        """Removes what has outlived its time; how many."""
        gone = self.book.expired()
        for row in gone:
            self.remove(row)
        return len(gone) + self._forget_snapshots()

    def _forget_snapshots(self) -> int:
        """Takes weights out of use that were saved to be sampled at once, ``SNAPSHOTS_S`` after the end of their session: no call of
        Tinker's deletes them, and a run of reinforcement learning makes one at each step."""
        stale = self.book.stale_snapshots(SNAPSHOTS_S)
        ids, of = [sampler.id for sampler in stale], collections.defaultdict[str, set[str]](set)
        for digest in {sampler.digest for sampler in stale if sampler.digest is not None}:
            if self.book.unused(digest, ids) and (policy := self._policy_of(digest)) is not None:
                of[policy].add(digest)
        for policy, digests in of.items():
            self._retire(policy, digests, "its session has ended")
        if ids:
            self.book.remove_samplers(ids)
        return len(ids)

    def _policy_of(self, digest: str) -> str | None:
        try:
            return self.catalog.resolve(digest).policy
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError:  # retired already
            return None
