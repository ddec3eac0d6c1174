"""Model names of a tenant, resolved to the bare base or to a revision's digest.

    the base's name                        the bare base
    tinker://.../sampler_weights/...       resolved by the ``sampler`` function
    a name given by ``load``               its revision at that time, until ``unload``
    base|URI                               a PEFT adapter, see ``AdapterUris``
    policy, policy@serving, policy@12      resolved by the catalog now; also a digest

A request resolves its name once and keeps the digest, so a promotion affects later requests only.
Unknown, retired and other tenants' names all raise the same ``NotFound``.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mint_jax.catalog.cli.peft_files import packed_object
from mint_jax.catalog.cli.sources import Source
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import as_bytes, digest_of
from mint_jax.catalog.records.names import clean, full_name
from mint_jax.errors import UserError
from mint_jax.lora.peft import is_peft
from mint_jax.models.base import Base
from mint_jax.models.outline import Outline
from mint_jax.service import book
from mint_jax.service.adapter_uris import MAX_BYTES, AdapterUris
from mint_jax.service.checkpoints import SCHEME, found_or_none


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
    """A name as the client sent it, and its revision's digest; None: the bare base. ``canary``: id
    of the alias's open canary. ``stand_in``: digest that answers while this one is loaded.
    """

    name: str
    digest: str | None = None
    policy: str | None = None
    number: int | None = None
    canary: int | None = None
    stand_in: str | None = None


class Page(NamedTuple):
    """A page of a tenant's models; ``more``: another page follows."""

    cards: list[dict[str, Any]]
    more: bool


class LoadedName(NamedTuple):
    """A revision under a name; ``data``: the packed bytes of a PEFT folder."""

    model: Model
    path: str
    at: float
    data: np.ndarray | None = None


class Weights:
    """The names of one server; may be called from any thread. Methods read databases and files.

    Args:
        base: the resident base, named ``base.name`` and ``also``.
        sampler: returns the digest of a tenant's ``tinker://`` path; raises a ``UserError`` for an
            unknown path.
        folder: root of the PEFT folders that ``load`` may read; None: it reads none.
        uris: adapters that requests may name by URI; None: none.
    """

    def __init__(
        self,
        base: Base,
        catalog: Catalog,
        sampler: Callable[[str, str], str],
        *,
        also: Sequence[str] = (),
        folder: Path | None = None,
        uris: AdapterUris | None = None,
    ):
        self.base, self.names = base, tuple(dict.fromkeys((base.name, *also)))
        self._catalog, self._sampler = catalog, sampler
        self._folder = None if folder is None else Path(os.path.realpath(folder))
        self._uris = uris or AdapterUris()
        self._began = time.time()
        # by tenant and name; each access is atomic
        self._loaded: dict[tuple[str, str], LoadedName] = {}

    def resolve(self, name: str, tenant: str) -> Model:
        """Resolves a name. Raises ``NotFound``: unknown, retired, or another tenant's."""
        if name in self.names:
            return Model(name)
        if "|" in name:
            base, _, uri = name.partition("|")
            if base not in self.names:
                raise UserError(
                    f"model {name[:200]!r} is of another base; this is {self.base.name}"
                )
            return Model(name, self._uris.digest(uri, self._packed))
        loaded = self._loaded.get((tenant, name))
        return loaded.model if loaded is not None else self._stored(name, tenant)

    def _stored(self, name: str, tenant: str) -> Model:
        """Returns ``resolve`` of a path or of the catalog's names."""
        # any reason but NotFound could reveal another tenant's policy
        if name.startswith(SCHEME):
            if (digest := found_or_none(self._sampler, tenant, name)) is not None:
                return Model(name, digest)
        elif (found := found_or_none(self._catalog.resolve, name, tenant)) is not None:
            where = found.policy, found.number, found.canary, found.stand_in
            return Model(name, found.digest, *where)
        raise NotFound(name)

    def load(self, name: str, path: str, tenant: str, inplace: bool = False) -> Model:
        """Names a revision for this tenant until ``unload``: of a name, a digest, a ``tinker://``
        path, or a PEFT folder below the server's. ``inplace``: the name may be loaded already.
        Raises ``Taken``: the name is in use; ``NotFound``: no such path; ``UserError``: an invalid
        name, or no adapter of this base.
        """
        name = clean("lora_name", name)
        replaces = inplace and (tenant, name) in self._loaded
        if not replaces and found_or_none(self.resolve, name, tenant) is not None:
            raise Taken(
                f"lora_name {name!r} is taken: unload it first, say load_inplace, or choose another"
                " name"
            )
        if (packed := self._read_folder(path)) is None:
            model = dataclasses.replace(self._stored(path, tenant), name=name, canary=None)
            data = None
        else:
            model = Model(name, digest_of(packed))
            data = self._data_of(model.digest)
            data = as_bytes(packed) if data is None else data  # one copy for all names
        self._loaded[tenant, name] = LoadedName(model, path, time.time(), data)
        return model

    def unload(self, name: str, tenant: str) -> None:
        """Removes a loaded name; requests that use its slot continue. Raises ``NotFound``."""
        if self._loaded.pop((tenant, name), None) is None:
            raise NotFound(name)

    def fetch(self, digest: str) -> np.ndarray:
        """Returns the packed bytes of a revision, for residency."""
        if (data := self._data_of(digest)) is not None:
            return data
        for source in self._uris.sources(digest):
            if digest_of(packed := self._packed(source)) == digest:
                return as_bytes(packed)
        return self._catalog.load(digest)

    def _loaded_as(self, digest: str | None) -> list[LoadedName]:
        return [one for one in self._loaded.copy().values() if one.model.digest == digest]

    def _data_of(self, digest: str | None) -> np.ndarray | None:
        found = (one.data for one in self._loaded_as(digest) if one.data is not None)
        return next(found, None)

    def names_of(self, digest: str) -> list[str]:
        """Returns the loaded names of a revision in all tenants; its digest if it has none."""
        return sorted({one.model.name for one in self._loaded_as(digest)}) or [digest]

    def page(self, tenant: str, after: str | None = None, limit: int = 100) -> Page:
        """Returns a page of models behind the id ``after``: the base, loaded names, and policies
        with a revision to sample, by name. Raises ``UserError``: ``after`` is not a name.
        """
        loaded = sorted(name for owner, name in self._loaded.copy() if owner == tenant)
        ids = [*self.names, *loaded]
        if after in ids:
            ids, after = ids[ids.index(after) + 1 :], None
        elif after is not None:
            ids = []
        cards = [card for id in ids if (card := found_or_none(self.card, id, tenant))]
        while len(cards) <= limit:
            behind = None if after is None else full_name(tenant, after)
            policies = self._catalog.policies(tenant, behind, limit + 1, state="active")
            if not policies:
                break
            after = policies[-1].name
            for one in policies:  # no revision of some can be sampled
                card = found_or_none(self.card, one.name, tenant)
                cards += [card | {"created": int(one.created_at)}] if card else []
        return Page(cards[:limit], len(cards) > limit)

    def card(self, name: str, tenant: str) -> dict[str, Any]:
        """Returns one model as in ``page``. Raises ``NotFound``: see ``resolve``."""
        model = self.resolve(name, tenant)
        root = name if model.policy is None else f"{model.policy}@{model.number}"
        loaded = self._loaded.get((tenant, name), LoadedName(model, root, self._began))
        is_base = model.digest is None
        return {
            "id": name,
            "object": "model",
            "created": int(loaded.at),
            "owned_by": "mint",
            "root": self.base.name if is_base else loaded.path,
            "parent": None if is_base else self.base.name,
            "max_model_len": self.base.cfg.context,
            "mint_revision": model.digest,
        }

    def _read_folder(self, path: str) -> bytes | None:
        """Returns the packed adapter of a PEFT folder; None if there is none below the root."""
        if self._folder is None or path.startswith(SCHEME) or "\0" in path:
            return None
        real = Path(os.path.realpath(self._folder / path))
        if not real.is_relative_to(self._folder) or not is_peft(real):
            return None
        try:
            return self._packed(Source(real, True, self._folder))
        except OSError as error:
            raise UserError(
                f"lora_path {path!r} cannot be read ({error.strerror or error}): check the folder"
            ) from None

    def _packed(self, source: Source) -> bytes:
        base = Outline(self.base.name, self.base.cfg, self.base.fingerprint)
        return packed_object(source, base, "keep", False, MAX_BYTES)
