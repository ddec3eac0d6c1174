"""Adapter revisions: one immutable, content-addressed object each.

The packed object is a valid safetensors file: the factors, one contiguous array per projection and A/B, and one metadata
entry ``schema`` that says base, rank, scale rule, targets and dtype. Its sha256 is the revision's digest, so the digest
covers payload, schema and base, the same adapter always has the same digest, and loading verifies.

A revision is a directory ``<root>/<digest>`` committed by Orbax: written beside its place, synced, then renamed. It is
there whole or not at all. Where several processes run, any one of them may write without the others.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save as save_safetensors

from mint_jax import multihost
from mint_jax import params as params_lib
from mint_jax.errors import UserError
from mint_jax.lora.tree import AdapterConfig

FORMAT = "mint-adapter/1"
FILE = "adapter.safetensors"
ABANDONED_S = 3600.0  # a staging folder untouched for so long has no writer


@dataclasses.dataclass(frozen=True)
class Schema:
    """What a packed adapter is.

    Attributes:
        base: fingerprint of the base it was trained on.
        config: rank, alpha, targets, scale rule.
        dtype: of the stored factors.
    """

    base: str
    config: AdapterConfig
    dtype: str = "float32"

    def to_json(self) -> str:
        fields = dataclasses.asdict(self.config) | {"targets": list(self.config.targets)}
        return json.dumps({"format": FORMAT, "base": self.base, "dtype": self.dtype, **fields}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        fields = json.loads(text)
        if fields.get("format") != FORMAT:
            raise UserError(f"adapter format is {fields.get('format')!r}; this version reads {FORMAT!r}")
        config = AdapterConfig(int(fields["rank"]), float(fields["alpha"]), tuple(fields["targets"]), bool(fields["rslora"]))
        return cls(fields["base"], config, fields["dtype"])


def pack(adapter: Any, schema: Schema) -> bytes:
    """One policy's factors -> the packed object. Deterministic: same values, same bytes."""
    flat = dict(sorted(params_lib.leaves_with_path(adapter)))
    tensors = {path: np.ascontiguousarray(leaf, dtype=np.dtype(schema.dtype)) for path, leaf in flat.items()}
    return save_safetensors(tensors, metadata={"schema": schema.to_json()})


def unpack(data: bytes) -> tuple[Any, Schema]:
    """The packed object -> factors and schema.

    Raises:
        UserError: not a packed adapter.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        schema = Schema.from_json(json.loads(data[8 : 8 + size])["__metadata__"]["schema"])
        flat = {name: _array(tensor) for name, tensor in deserialize(data)}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"not a packed adapter revision ({error}): import PEFT directories with the import job") from None
    return params_lib.nest(flat), schema


def _array(tensor: dict[str, Any]) -> np.ndarray:
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return np.frombuffer(tensor["data"], np.dtype(dtypes[tensor["dtype"]])).reshape(tensor["shape"]).copy()


def digest_of(data: bytes) -> str:
    """The revision digest of a packed object."""
    return hashlib.sha256(data).hexdigest()


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
