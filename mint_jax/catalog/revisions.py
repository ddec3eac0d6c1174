"""Adapter revisions, each a directory of its own.

A revision is a directory ``<root>/<digest>`` that holds one packed object (see ``packed``), committed by Orbax: written
beside its place, synced, then renamed. It is there whole or not at all. Where several processes run, any one of them
may write without the others.
"""

import dataclasses
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from mint_jax import multihost
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack  # noqa: F401 - others import Schema and pack from here
from mint_jax.errors import UserError

FILE = "adapter.safetensors"
ABANDONED_S = 3600.0  # a staging folder untouched for so long has no writer


class _PackedHandler(ocp.CheckpointHandler):
    """Writes and reads the packed object inside an Orbax checkpoint directory."""

    def save(self, directory: epath.Path, args: "_PackedSave") -> None:  # type: ignore[override]
        with open(directory / FILE, "wb") as file:
            file.write(args.data)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, directory: epath.Path, args: "_PackedRestore | None" = None) -> bytes:  # type: ignore[override]
        del args
        return (directory / FILE).read_bytes()


@ocp.args.register_with_handler(_PackedHandler, for_save=True)
@dataclasses.dataclass
class _PackedSave(ocp.args.CheckpointArgs):
    data: bytes


@ocp.args.register_with_handler(_PackedHandler, for_restore=True)
@dataclasses.dataclass
class _PackedRestore(ocp.args.CheckpointArgs):
    pass


class RevisionStore:
    """Revisions under one folder."""

    def __init__(self, root: str | Path):
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what killed writers left; younger than ``ABANDONED_S`` it may belong to a living one."""
        for path in self.root.iterdir():
            if not (path.name.startswith(".") or path.name.endswith(".orbax-checkpoint-tmp")):
                continue
            try:
                abandoned = time.time() - path.stat().st_mtime > ABANDONED_S
            except FileNotFoundError:  # its writer has just renamed or removed it
                continue
            if abandoned:
                shutil.rmtree(path, ignore_errors=True)

    def put(self, data: bytes) -> str:
        """Stores a packed object and returns its digest; storing the same bytes again only reads them.

        Raises:
            UserError: the disk is full or not writable; nothing is left behind.
        """
        digest = digest_of(data)
        place = self.root / digest
        if self._holds(digest):
            return digest
        mine = self.root / f".{digest[:16]}-{uuid.uuid4().hex}"  # every writer has its own: Orbax stages beside this name
        try:
            # By default Orbax waits for all processes and all devices; here one process writes, in a thread beside the training.
            alone = ocp.options.MultiprocessingOptions(
                primary_host=multihost.index(), active_processes={multihost.index()}, barrier_sync_key_prefix=mine.name
            )
            with ocp.Checkpointer(_PackedHandler(), multiprocessing_options=alone) as checkpointer:
                checkpointer.save(mine, args=_PackedSave(data))
            if place.exists() and not self._holds(digest):  # damaged: make room
                place.rename(mine.with_suffix(".damaged"))
            try:
                mine.rename(place)
            except OSError:
                if not self._holds(digest):  # else another writer of the same bytes was faster: fine
                    raise
            _sync(self.root)
        except OSError as error:
            raise UserError(f"revision {digest[:12]} cannot be written in {self.root} ({error}): free disk space or check rights") from None
        finally:
            for left in self.root.glob(f"{mine.name}*"):
                shutil.rmtree(left, ignore_errors=True)
        return digest

    def _holds(self, digest: str) -> bool:
        path = self.root / digest / FILE
        return path.is_file() and digest_of(path.read_bytes()) == digest

    def get(self, digest: str) -> tuple[Any, Schema]:
        """Loads and verifies a revision.

        Raises:
            UserError: an unknown digest, or bytes that are not what the digest says.
        """
        path = self.root / digest / FILE
        if not path.is_file():
            raise UserError(f"revision {digest[:12]} is not in {self.root}: list the folder, or import the adapter first")
        data = path.read_bytes()
        found = digest_of(data)
        if found != digest:
            raise UserError(
                f"revision {digest[:12]} in {self.root} is corrupt: its bytes have digest {found[:12]}; export or import it again"
            )
        return unpack(data)

    def __iter__(self):
        return iter(sorted(p.name for p in self.root.iterdir() if len(p.name) == 64 and (p / FILE).is_file()))


def _sync(directory: Path) -> None:
    """Makes a rename inside ``directory`` durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
