"""Model names of a tenant, resolved to the bare base or to a revision's digest.

    the base's name                        the bare base
    tinker://.../sampler_weights/...       resolved by the ``sampler`` function
    a name given by ``load``               its revision at that time, until ``unload``
    policy, policy@serving, policy@12      resolved by the catalog now; also a digest

A request resolves its name once and keeps the digest, so a promotion affects later requests only.
Unknown, retired and other tenants' names all raise the same ``NotFound``.
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
from mint_jax.catalog.storage.payloads import StorageFailed
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
    """A name as the client sent it, and the digest of its revision; None: the bare base. Policy and
    number if the revision is in a catalog.
    """

    name: str
    digest: str | None = None
    policy: str | None = None
    number: int | None = None


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of a tenant's models; ``more``: another page follows."""

    cards: list[dict[str, Any]]
    more: bool


class Weights:
    """The names of one server; may be called from any thread. Methods read databases and files.

    Args:
        base: the resident base, named ``base.name`` and ``also``.
        sampler: returns the digest of a tenant's ``tinker://`` path; raises a ``UserError`` for an
            unknown path.
        folder: root of the PEFT folders that ``load`` may read; None: it reads none.
    """

    def __init__(
        self,
        base: Base,
        catalog: Catalog,
        sampler: Callable[[str, str], str],
        *,
        also: Sequence[str] = (),
        folder: Path | None = None,
    ):
        self.base, self.names = base, tuple(dict.fromkeys((base.name, *also)))
        self._catalog, self._sampler = catalog, sampler
        self._folder = None if folder is None else Path(os.path.realpath(folder))
        self._began = time.time()
        self._lock = threading.Lock()  # of the two below
        # (tenant, name) -> model, path, when
        self._loaded: dict[tuple[str, str], tuple[Model, str, float]] = {}
        self._bytes: dict[str, np.ndarray] = {}  # of PEFT folders, by digest

    def resolve(self, name: str, tenant: str) -> Model:
        """Resolves a name. Raises ``NotFound``: unknown, retired, or another tenant's."""
        if name in self.names:
            return Model(name)
        with self._lock:
            loaded = self._loaded.get((tenant, name))
        return loaded[0] if loaded is not None else self._stored(name, tenant)

    def _stored(self, name: str, tenant: str) -> Model:
        """``resolve`` of a path or of the catalog's names."""
        try:
            if name.startswith(SCHEME):
                return Model(name, self._sampler(tenant, name))
            found = self._catalog.resolve(name, tenant)
            return Model(name, found.digest, found.policy, found.number)
        except (DatabaseFailed, StorageFailed):
            raise
        except UserError:  # the reason could reveal another tenant's policy
            raise NotFound(name) from None

    def load(self, name: str, path: str, tenant: str, inplace: bool = False) -> Model:
        """Names a revision for this tenant until ``unload``: of a name, a digest, a ``tinker://``
        path, or a PEFT folder below the server's. ``inplace``: the name may be loaded already.
        Raises ``Taken``: the name is in use; ``NotFound``: no such path; ``UserError``: an invalid
        name, or no adapter of this base.
        """
        name = clean("lora_name", name)
        with self._lock:
            loaded = (tenant, name) in self._loaded
        if (loaded and not inplace) or (not loaded and self._exists(name, tenant)):
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
            self._loaded[tenant, name] = model, path, time.time()
            self._forget_unnamed()
        return model

    def unload(self, name: str, tenant: str) -> None:
        """Removes a loaded name; requests that use its slot continue. Raises ``NotFound``."""
        with self._lock:
            if self._loaded.pop((tenant, name), None) is None:
                raise NotFound(name)
            self._forget_unnamed()

    def fetch(self, digest: str) -> np.ndarray:
        """Returns the packed bytes of a revision, for residency."""
        with self._lock:
            data = self._bytes.get(digest)
        return self._catalog.load(digest) if data is None else data

    def names_of(self, digest: str) -> list[str]:
        """Returns the loaded names of a revision in all tenants; its digest if it has none."""
        with self._lock:
            found = {
                name for (_, name), (one, _, _) in self._loaded.items() if one.digest == digest
            }
        return sorted(found) or [digest]

    def page(self, tenant: str, after: str | None = None, limit: int = 100) -> Page:
        """Returns a page of models behind the id ``after``: the base, loaded names, and policies
        with a revision to sample, by name. Raises ``UserError``: ``after`` is not a name.
        """
        with self._lock:
            loaded = sorted(
                (name, *what) for (owner, name), what in self._loaded.items() if owner == tenant
            )
        cards = [self._card(name, self._began) for name in self.names]
        cards += [self._card(name, when, path, model) for name, model, path, when in loaded]
        ids = [card["id"] for card in cards]
        if after in ids:
            cards, after = cards[ids.index(after) + 1 :], None
        elif after is not None:
            cards = []
        while len(cards) <= limit:
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
                except NotFound:  # no revision of it can be sampled
                    continue
                root = f"{policy.policy}@{model.number}"
                cards.append(self._card(policy.name, policy.created_at, root, model))
        return Page(cards[:limit], len(cards) > limit)

    def card(self, name: str, tenant: str) -> dict[str, Any]:
        """Returns one model as in ``page``. Raises ``NotFound``: see ``resolve``."""
        model = self.resolve(name, tenant)
        with self._lock:
            _, path, when = self._loaded.get((tenant, name), (None, None, self._began))
        if model.digest is None:
            return self._card(name, when)
        root = name if model.policy is None else f"{model.policy}@{model.number}"
        return self._card(name, when, path or root, model)

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

    def _exists(self, name: str, tenant: str) -> bool:
        try:
            self.resolve(name, tenant)
        except NotFound:
            return False
        return True

    def _read_folder(self, path: str) -> bytes | None:
        """Returns the packed adapter of a PEFT folder; None if there is none below the root."""
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
