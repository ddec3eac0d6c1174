"""Model names of a tenant, resolved to the bare base or to a revision's digest.

    the base's name                        the bare base
    tinker://…/sampler_weights/…           what a function that is given says
    a name given by ``load``               what it stood for then, until ``unload``
    policy, policy@serving, policy@12      what the catalog says now; also a digest

A request asks once and keeps the digest, so that a promotion moves later requests only. What is
unknown, retired or another tenant's is ``NotFound``, in the same words.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint_jax.catalog.cli.peft_files import packed_object
from mint_jax.catalog.cli.sources import Source
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import as_bytes, digest_of
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.catalog.records.names import clean, full_name
from mint_jax.catalog.storage.interface import StorageFailed
from mint_jax.errors import UserError
from mint_jax.lora.peft import is_peft
from mint_jax.models.base import Base
from mint_jax.models.outline import Outline
from mint_jax.service import book

SCHEME = "tinker://"
MAX_BYTES = 4 << 30  # of a PEFT folder's weights


class NotFound(book.NotFound):
    """No model of that name, for this tenant."""

    def __init__(self, name: str):
        super().__init__(
            f"model {name[:200]!r} does not exist here: list the models, or load the adapter first"
        )


class Taken(UserError):
    """The name stands for something already."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A resolved name.

    Attributes:
        name: as it was written.
        digest: of the revision; None: the bare base.
        policy, number: of the revision, where a catalog has it.
    """

    name: str
    digest: str | None = None
    policy: str | None = None
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Page:
    """Some of the models that a tenant can name, and whether there are more behind them."""

    cards: list[dict[str, Any]]
    more: bool


class Weights:
    """The names of one server. All methods may be called from any thread; they read databases and
    files.

    Args:
        base: what is resident; it goes by ``base.name`` and ``also``.
        catalog: of policies; None: there are none.
        sampler: (tenant, path) -> digest of ``tinker://`` paths; raises a ``UserError`` for a path
            that the tenant does not have.
        folder: below which ``load`` reads PEFT folders; None: it reads none.
        below: where ``fetch`` goes for what was not loaded from a folder.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        base: Base,
        catalog: Catalog | None = None,
        *,
        also: Sequence[str] = (),
        sampler: Callable[[str, str], str] | None = None,
        folder: Path | None = None,
        below: Callable[[str], np.ndarray] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self.base, self.names = base, tuple(dict.fromkeys((base.name, *also)))
        self._catalog, self._sampler, self._below = catalog, sampler, below
        self._folder = None if folder is None else Path(os.path.realpath(folder))
        self._clock, self._began = clock, clock()
        self._lock = threading.Lock()  # of the two below
        # (tenant, name) -> model, path, when
        self._loaded: dict[tuple[str, str], tuple[Model, str, float]] = {}
        self._bytes: dict[str, np.ndarray] = {}  # of PEFT folders, by digest

    def resolve(self, name: str, tenant: str) -> Model:
        """Resolves a name.

        Raises:
            NotFound: unknown, retired, or another tenant's.
            DatabaseFailed, StorageFailed: nobody can tell now.
        """
        if name in self.names:
            return Model(name)
        with self._lock:
            loaded = self._loaded.get((tenant, name))
        return loaded[0] if loaded is not None else self._stored(name, tenant)

    def _stored(self, name: str, tenant: str) -> Model:
        """``resolve`` of a path or of the catalog's names."""
        try:
            if name.startswith(SCHEME) and self._sampler is not None:
                return Model(name, self._sampler(tenant, name))
            if not name.startswith(SCHEME) and self._catalog is not None:
                found = self._catalog.resolve(name, tenant)
                return Model(name, found.digest, found.policy, found.number)
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError:  # why is not for one who may have no right to know that it is there
            pass
        raise NotFound(name)

    def load(self, name: str, path: str, tenant: str, inplace: bool = False) -> Model:
        """Gives a revision a name of this tenant's, until ``unload``.

        Args:
            path: a revision's name or digest, a ``tinker://`` path, or a PEFT folder below the
                server's.
            inplace: the name may have been given before.

        Raises:
            Taken: the name stands for something already.
            NotFound: no such path.
            UserError: a name that is none, or a folder that cannot be read as an adapter of this
                base.
        """
        name = clean("lora_name", name)
        with self._lock:
            there = (tenant, name) in self._loaded
        if (there and not inplace) or (not there and self._stands(name, tenant)):
            raise Taken(
                f"lora_name {name!r} is taken: unload it first, say load_inplace, or choose another"
                " name"
            )
        data = self._read_folder(path)
        model = (
            Model(name, digest_of(data))
            if data is not None
            else dataclasses.replace(self._stored(path, tenant), name=name)
        )
        assert model.digest is not None
        with self._lock:
            if data is not None:
                self._bytes[model.digest] = as_bytes(data)
            self._loaded[tenant, name] = model, path, self._clock()
            self._forget_unnamed()
        return model

    def unload(self, name: str, tenant: str) -> None:
        """Takes a name back; requests that have its slot go on.

        Raises:
            NotFound: it was not given by ``load`` to this tenant.
        """
        with self._lock:
            if self._loaded.pop((tenant, name), None) is None:
                raise NotFound(name)
            self._forget_unnamed()

    def fetch(self, digest: str) -> np.ndarray:
        """The packed bytes of a revision, for residency.

        Raises:
            UserError: it was unloaded, or ``below`` does not have it.
        """
        with self._lock:
            data = self._bytes.get(digest)
        if data is not None:
            return data
        if self._below is None:
            raise UserError(f"revision {digest[:16]} is loaded no more: load it again")
        return self._below(digest)

    def names_of(self, digest: str) -> list[str]:
        """The names that ``load`` gave a revision, in all tenants; its digest where there is
        none.
        """
        with self._lock:
            return sorted(
                {
                    name
                    for (_, name), (model, _, _) in self._loaded.items()
                    if model.digest == digest
                }
            ) or [digest]

    def page(self, tenant: str, after: str | None = None, limit: int = 100) -> Page:
        """A page of models: the base, names that were loaded, and policies with a revision to
        sample, by name.

        Args:
            after: the last page's last id.

        Raises:
            UserError: ``after`` is no name.
        """
        with self._lock:
            mine = sorted(
                (name, *what) for (owner, name), what in self._loaded.items() if owner == tenant
            )
        cards = [self._card(name, self._began) for name in self.names]
        cards += [self._card(name, when, path, model) for name, model, path, when in mine]
        ids = [card["id"] for card in cards]
        if after in ids:
            cards, after = cards[ids.index(after) + 1 :], None
        elif after is not None:
            cards = []
        while len(cards) <= limit and self._catalog is not None:
            some = self._catalog.policies(
                tenant,
                None if after is None else full_name(tenant, after),
                limit + 1,
                state="active",
            )
            if not some:
                break
            after = some[-1].name
            for policy in some:
                try:
                    model = self.resolve(policy.name, tenant)
                except NotFound:  # nothing of it can be sampled
                    continue
                cards.append(
                    self._card(
                        policy.name, policy.created_at, f"{policy.policy}@{model.number}", model
                    )
                )
        return Page(cards[:limit], len(cards) > limit)

    def card(self, name: str, tenant: str) -> dict[str, Any]:
        """One model, as ``page`` tells it.

        Raises:
            NotFound: see ``resolve``.
        """
        model = self.resolve(name, tenant)
        with self._lock:
            _, path, when = self._loaded.get((tenant, name), (None, None, self._began))
        if model.digest is None:
            return self._card(name, when)
        return self._card(
            name,
            when,
            path or (name if model.policy is None else f"{model.policy}@{model.number}"),
            model,
        )

    def _card(
        self, name: str, created: float, root: str | None = None, model: Model | None = None
    ) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(created),
            "owned_by": "mint",
            "root": root or self.base.name,
            "parent": None if model is None else self.base.name,
            "max_model_len": self.base.cfg.context,
            "mint_revision": None if model is None else model.digest,
        }

    def _stands(self, name: str, tenant: str) -> bool:
        try:
            self.resolve(name, tenant)
        except NotFound:
            return False
        return True

    def _read_folder(self, path: str) -> bytes | None:
        """The packed adapter of a PEFT folder; None for what is none that may be read."""
        if self._folder is None or path.startswith(SCHEME) or "\0" in path:
            return None
        real = Path(os.path.realpath(self._folder / path))
        if not real.is_relative_to(self._folder) or not is_peft(real):
            return None
        base = Outline(self.base.name, self.base.cfg, self.base.fingerprint)
        try:
            return packed_object(Source(real, True, self._folder), base, "keep", False, MAX_BYTES)
        except OSError as error:
            raise UserError(
                f"lora_path {path!r} cannot be read ({error.strerror or error}): check the folder"
            ) from None

    def _forget_unnamed(self) -> None:
        """Drops the bytes of folders whose names are gone."""
        named = {model.digest for model, _, _ in self._loaded.values()}
        for digest in [digest for digest in self._bytes if digest not in named]:
            del self._bytes[digest]
