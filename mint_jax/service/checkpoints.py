"""Checkpoints of policies in training, under Tinker's paths ``tinker://<model>/<kind>/<name>``.

Several rows may name the same bytes: checkpoints of equal states, copies, samplers. A reader or
writer marks a digest as in use before it looks for the bytes, and until the row that names them is
committed. Bytes are deleted under the lock of these marks, only if no row names them and no one
uses them. A client waits for the transaction that removes its row and notes the bytes; ``reclaim``
deletes them, now or later.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mint_jax import files
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, as_bytes, digest_of, pack
from mint_jax.catalog.records import names
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.storage.payloads import StorageFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.service import external
from mint_jax.service.book import INFLIGHT, Book, Checkpoint, Sampler
from mint_jax.service.server_db import DatabaseDamaged
from mint_jax.service.training_calls import Load, Save
from mint_jax.train.host_state import HostState

log = logging.getLogger("mint_jax.service")
SCHEME = "tinker://"
KINDS = {  # of paths, with Tinker's names of their types
    "weights": "training",  # a state without pending gradients, a file named by its digest
    "sampler_weights": "sampler",  # a revision of the policy with the model's name, if unnamed too
    "external_weights": "external",  # the adapter as PEFT's files: see ``external.py``
}
SNAPSHOTS_S = 86400.0
MAX_NAMED = 4096  # revisions whose policy is remembered
T = TypeVar("T")
DISK_FAILURES = DatabaseFailed, DatabaseDamaged, StorageFailed


class CheckpointPath(NamedTuple):
    model: str
    kind: str
    name: str


def parse(path: str) -> CheckpointPath:
    """Parses a checkpoint's path. Raises ``UserError`` if it is malformed."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS or not all(parts):
        raise UserError(
            f"path is {path[:200]!r}; expected {SCHEME}MODEL/KIND/NAME with a kind of"
            f" {', '.join(KINDS)}"
        )
    return CheckpointPath(*parts)


def check_name(name: Any) -> str:
    """Returns a checkpoint's name, one segment of its path. Raises ``UserError`` if it is not."""
    if not isinstance(name, str) or not name or set(name) & set("\\?#"):
        raise UserError(
            f"a checkpoint's name is {str(name)[:80]!r}; expected one segment of a path, as in"
            " step-100"
        )
    return names.clean("a checkpoint's name", name)


def found_or_none(find: Callable[..., Any], *args: Any) -> Any:
    """Returns ``find(*args)``, or None for a ``UserError`` that is not a failed disk."""
    try:
        return find(*args)
    except DISK_FAILURES:
        raise
    except UserError:
        return None


class Checkpoints:
    """The checkpoints of one server.

    Args:
        offer: called with (digest, packed bytes, tenant) of weights that are sampled next, before
            they are written: their transfer to the device does not wait for the disk.
        need_room: called with (tenant, further bytes); raises beyond a quota.
    """

    def __init__(
        self,
        folder: Path,
        book: Book,
        catalog: Catalog,
        base: Base,
        offer: Callable[[str, np.ndarray, str], Any] = lambda digest, data, tenant: None,
        need_room: Callable[[str, int], None] = lambda tenant, more: None,
    ):
        self.folder, self.external, self.book = folder, folder / "external", book
        self.catalog, self.base, self.specs = catalog, base, transformer.abstract(base.cfg)
        self._need_room, self._offer = need_room, offer
        self._naming = threading.Lock()  # of the check and the assignment of names and quotas
        # models of revisions that the catalog does not have yet
        self._writing: dict[str, str] = {}
        # a lookup that fails raises, and is not remembered
        self._policy = functools.lru_cache(MAX_NAMED)(self._find_policy)
        self._marks = threading.RLock()  # of ``_in_use``; bytes are deleted under it
        # digests, and policies with an export
        self._in_use: collections.Counter[str] = collections.Counter()
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def using(self, *keys: str) -> Iterator[None]:
        """Keeps the bytes of digests, and the revisions of policies, until the block ends."""
        with self._marks:
            self._in_use.update(keys)
        try:
            yield
        finally:
            with self._marks:
                self._in_use.subtract(keys)
                self._in_use = +self._in_use

    @contextlib.contextmanager
    def reading(self, tenant: str, path: str) -> Iterator[Checkpoint]:
        """Yields the row of a path, the tenant's or a public one, and keeps its bytes until the
        block ends. Raises ``NotFound`` or ``UserError``.
        """
        with contextlib.ExitStack() as use:
            with self._marks:  # no removal between the row and the mark
                row = self.book.checkpoint(tenant, *parse(path), published=True)
                use.enter_context(self.using(row.digest))
            yield row

    def add(
        self, row: Checkpoint, write: Callable[[], None], more: int, overwrite: bool = False
    ) -> None:
        """Writes bytes and adds the row that names them: ``more`` bytes of the tenant's quota.
        Raises ``UserError``: the name is taken, or the quota is used up.
        """
        with self._naming:
            if not overwrite:
                self.book.need_free(*row.key, row.request)
            replaced = found_or_none(self.book.checkpoint, row.tenant, *row.key)
            self._need_room(row.tenant, more - (0 if replaced is None else replaced.nbytes))
            self._write(row, write, lambda: self.book.add_checkpoint(row))
        self.reclaim()  # what it replaced

    def _write(self, row: Checkpoint, write: Callable[[], None], name: Callable[[], T]) -> T:
        """Writes bytes and names them in the book; leaves nothing if either fails."""
        try:
            with self.using(row.digest, row.policy):
                write()
                return name()
        except BaseException:
            # the client gets the save's own failure; ``sweep`` finds the rest
            with contextlib.suppress(Exception):
                self._delete(row.digest, row.policy, row.kind)
            raise

    # training

    def save(self, model: str, request: str, call: Save, state: HostState) -> dict[str, Any]:
        """Writes a state; returns the client's result. Raises ``UserError`` as ``add``, or if
        weights to sample are not finite.
        """
        tenant = self.book.owner(model)
        policy = f"{tenant}/{model}"
        if call.kind == "weights":
            data = state.to_bytes()
            digest, nbytes = blake3_of(data), len(data)
            write = functools.partial(files.write_file, self._file(digest), data)
        elif call.kind == "sampler_weights":
            schema = Schema(self.base.fingerprint, lora_tree.spelled_out(state.config, self.specs))
            packed = as_bytes(pack(state.adapter(), schema))
            digest, nbytes = digest_of(packed), packed.nbytes
            write = functools.partial(self._export, policy, digest, packed, state.steps, call)
        else:
            contents = external.files_of(state, self.base, call.recipients)
            digests = (blake3_of(f"{name}\0".encode() + d) for name, d in contents.items())
            digest, nbytes = blake3_of("".join(digests).encode()), sum(map(len, contents.values()))
            write = functools.partial(self._write_files, digest, contents)
        row = Checkpoint(
            *(model, call.kind, call.name or "", tenant, digest, nbytes, request),
            details={
                "config": dataclasses.asdict(state.config),
                "base": self.base.fingerprint,
                "policy": policy,
                "optimizer": self.book.model(tenant, model).optimizer,
                "metadata": call.metadata,
            },
            **self._lifetime(call.ttl_s),
            public=False,
        )
        if call.sampler is None:
            self.add(row, write, state.nbytes, call.overwrite)
            return {"path": row.path}
        session, number = call.sampler.rsplit(":sample:", 1)
        new = session, int(number), tenant, INFLIGHT + model if call.inflight else None, digest
        sampler = self._write(row, write, lambda: self.book.add_sampler(*new))
        return {"sampling_session_id": sampler.id}

    def _lifetime(self, ttl_s: int | None) -> dict[str, Any]:
        now = self.book.clock()
        return {"created": now, "expires": None if ttl_s is None else now + ttl_s}

    def _export(self, policy: str, digest: str, data: np.ndarray, steps: int, call: Save) -> None:
        """Makes the adapter a revision."""
        tenant, _, self._writing[digest] = policy.partition("/")
        try:
            if call.sampler is not None:
                self._offer(digest, data, tenant)
            self.catalog.export(policy, data, steps, create=True, by="service")
        finally:
            self._writing.pop(digest, None)

    def _write_files(self, digest: str, contents: dict[str, bytes]) -> None:
        folder = self.external / digest
        if not folder.exists():
            with files.new_directory(folder, proof=next(iter(contents))) as new:
                for name, data in contents.items():
                    files.write_file(new / name, data)
            files.sync_folder(folder.parent)

    def load(self, call: Load, kept: Path) -> HostState:
        """Returns the state of a path, with or without its moments.

        The state is linked to ``kept-DIGEST``, durably; a link that exists is loaded again, even if
        the path is gone. Raises ``UserError``: it is no training state, or of another base.
        """
        if parse(call.path).kind != "weights":
            raise UserError(
                f"{call.path} are weights to sample from; training goes on from"
                " tinker://MODEL/weights/NAME, which save_state makes"
            )
        if (file := next(kept.parent.glob(f"{kept.name}-*"), None)) is None:
            with self.reading(call.tenant, call.path) as row:
                self.need_base(row)
                file = kept.with_name(f"{kept.name}-{row.digest}")
                files.link(self._file(row.digest, row.model), file)
        data, digest = file.read_bytes(), file.name.removeprefix(f"{kept.name}-")
        if blake3_of(data) != digest:
            raise UserError(
                f"{call.path} is damaged: its digest is not {digest}; load another checkpoint"
            )
        state = HostState.from_bytes(data, call.path)
        return state if call.optimizer else state.fresh()

    def _file(self, digest: str, model: str = "") -> Path:
        """Returns the file of a state; ``model``: of any engine of a fleet."""
        other = self.book.database.other_folder(model)
        folder = self.folder if other is None else other / self.folder.name
        return folder / f"{digest}.safetensors"

    # sampling

    def sampled(self, tenant: str, path: str, published: bool = True) -> Checkpoint:
        """Returns the row of a path to sample. Raises ``NotFound`` or ``UserError``."""
        where = parse(path)
        if where.kind != "sampler_weights":
            raise UserError(
                f"{path[:200]} cannot be sampled; save_weights_for_sampler makes paths that can"
            )
        return self.book.checkpoint(tenant, *where, published=published)

    def digest(self, tenant: str, path: str) -> str:
        """Returns the digest of a path to sample; raises as ``sampled``."""
        return self.sampled(tenant, path).digest

    def add_sampler(self, session: str, number: int, tenant: str, path: str) -> Sampler:
        """Returns a session's sampler of a path's weights, created unless it exists."""
        with self.reading(tenant, path) as row:
            return self.book.add_sampler(session, number, tenant, path, row.digest)

    # REST

    def need_base(self, row: Checkpoint) -> None:
        """Raises ``UserError`` for a checkpoint of another base."""
        if (base := row.details["base"]) != self.base.fingerprint:
            raise UserError(
                f"{row.path} is of base {base[:12]}, this is {self.base.fingerprint[:12]}: load it"
                " where its own is"
            )

    def config(self, row: Checkpoint) -> AdapterConfig:
        fields = row.details["config"]
        return AdapterConfig(**fields | {"targets": tuple(fields["targets"])})

    def copy(self, tenant: str, source: str, model: str, request: str, ttl_s: int | None) -> str:
        """Returns the path of a copy that belongs to another model; bytes are shared."""
        with self.reading(tenant, source) as row:
            # its details name the source's policy, which has a sampler checkpoint's revision
            new = {"model": model, "tenant": tenant, "request": request, "public": False}
            made = dataclasses.replace(row, **new, **self._lifetime(ttl_s))
            self.add(made, lambda: None, 0 if row.tenant == tenant else row.nbytes)
        return made.path

    # removal

    def remove(self, row: Checkpoint) -> None:
        """Removes a row; ``reclaim`` deletes its bytes, now or later. Raises ``NotFound``."""
        self.book.remove_checkpoint(row)
        self.reclaim()

    def expire(self) -> int:
        """Removes rows whose time is over, and unnamed weights of samplers ``SNAPSHOTS_S`` after
        their session: no call deletes these, and reinforcement learning makes one at each step.
        """
        count = self.book.remove_expired(SNAPSHOTS_S)
        self.reclaim()
        return count

    def reclaim(self) -> None:
        """Deletes removed bytes that no row names and no one uses, as far as it can."""
        try:
            for digest, policy, kind in self.book.reclaimable():
                if self._delete(digest, policy, kind):
                    self.book.reclaimed(digest, policy)
        except Exception:
            log.exception("bytes of removed checkpoints are not deleted yet")

    def _delete(self, digest: str, policy: str, kind: str) -> bool:
        """Deletes bytes; returns False if they are in use or a row names them."""
        with self._marks:
            if not policy:  # of a sampler: the model that exported them
                model = found_or_none(self._find_policy, digest) or ""
                owner = found_or_none(self.book.owner, model)
                policy = "" if owner is None else f"{owner}/{model}"
            if {digest, policy} & self._in_use.keys() or not self.book.unused(digest):
                return False
            if kind == "weights":
                self._file(digest).unlink(missing_ok=True)
            elif kind == "external_weights":
                shutil.rmtree(self.external / digest, ignore_errors=True)
            elif policy:
                self._retire(policy, digest)
        return True

    def _retire(self, policy: str, digest: str) -> None:
        """Retires revisions of a digest, but not a policy's last one or one with an alias."""
        aliases = found_or_none(self.catalog.aliases, policy)
        if aliases is None:  # the policy was deleted
            return
        named = {alias.number for alias in aliases if alias.name != names.LATEST}
        live, page = {}, self.catalog.revisions(policy)
        while page:
            live |= {one.number: one.digest for one in page if one.state == "live"}
            page = self.catalog.revisions(policy, after=page[-1].number)
        going = [number for number in live if live[number] == digest and number not in named]
        if len(going) == len(live):
            going = going[:-1]
        if not going:
            return
        latest, why = max(live.keys() - going), "its checkpoint was removed"
        self.catalog.promote(policy, latest, names.LATEST, by="service", why=why)
        for number in going:
            self.catalog.retire(policy, number, by="service", why=why)

    def sweep(self) -> None:
        """Deletes half-written files and bytes without a row, which a killed process left."""
        for path in (*self.folder.iterdir(), *self.external.glob("*")):
            digest = path.name.removesuffix(".safetensors")
            if path.name.startswith(".") or (_is_digest(digest) and self.book.unused(digest)):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def policy_of(self, digest: str) -> str:
        """Returns the model or the policy of a revision's digest; other texts stay as they are."""
        if not _is_digest(digest):
            return digest
        return self._writing.get(digest) or found_or_none(self._policy, digest) or digest

    def _find_policy(self, digest: str) -> str:
        policy = self.catalog.resolve(digest).policy
        _, model = names.parse_policy(policy)
        return policy if found_or_none(self.book.owner, model) is None else model


def _is_digest(text: str) -> bool:
    return len(text) == 64 and names.is_digest(text)
