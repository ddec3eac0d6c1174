"""A revision as an Orbax checkpoint in a folder, which Orbax restores without this package.

Two items: ``adapter``, the factors in the layout of ``lora.tree``, and ``revision``, JSON with the
packed object's ``schema``, its ``digest``, policy and number. Orbax 0.12 refuses ``s3://`` paths
for arrays; ``gs://`` was not tried.
"""

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from mint_jax import nested
from mint_jax.catalog.packed import Buffer, Schema, digest_of, pack, unpack
from mint_jax.errors import UserError
from mint_jax.safetensors_header import parse_object

ADAPTER, REVISION = "adapter", "revision"
MAX_JSON = 4 << 20
_MARK = "_CHECKPOINT_METADATA"  # Orbax's own file in every checkpoint


def is_revision(names: set[str]) -> bool:
    """True for the entries of a checkpoint made by ``write``."""
    return {_MARK, ADAPTER, REVISION} <= names


def write(directory: str | Path, data: Buffer, about: Mapping[str, Any]) -> None:
    """Writes a packed object as a checkpoint, atomically. ``about`` are more fields of the JSON
    item, such as policy and number. Raises ``UserError`` if the directory exists, or cannot be
    written.
    """
    import orbax.checkpoint as ocp  # takes seconds, which a listing need not wait for

    if "://" in str(directory):
        raise UserError(
            f"output {str(directory)[:80]!r} is not a folder: Orbax does not write arrays to s3://;"
            " write it to a folder"
        )
    directory = Path(directory).absolute()
    if directory.exists():
        raise UserError(f"output {directory} exists: choose a new directory, or remove it")
    adapter, schema = unpack(data)
    about = {"schema": json.loads(schema.to_json()), "digest": digest_of(data), **about}
    items = ocp.args.Composite(
        **{ADAPTER: ocp.args.StandardSave(adapter), REVISION: ocp.args.JsonSave(about)}
    )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(directory, items)
    except Exception as error:  # Orbax raises many kinds
        raise UserError(
            f"output {directory} cannot be written ({_first_line(error)}): choose another place, or"
            " free disk space"
        ) from None


def read(directory: Path, max_bytes: int) -> bytes:
    """Returns the packed object of a checkpoint, checked before its factors are read. Raises
    ``UserError``: no such checkpoint, links in it, more than ``max_bytes``, or factors that do not
    match its schema or its digest.
    """
    import jax
    import orbax.checkpoint as ocp

    for path in directory.rglob("*"):
        if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISDIR(mode)):
            raise UserError(f"{path.relative_to(directory)} is no regular file")
    path = directory / REVISION / "metadata"
    if path.stat().st_size > MAX_JSON:
        raise UserError(f"its item {REVISION!r} has more than {MAX_JSON:,} bytes")
    recorded = parse_object(path.read_bytes(), f"the item {REVISION!r}")
    schema = Schema.from_json(json.dumps(recorded.get("schema")))
    try:
        # cast: Orbax declares its own class for paths
        handler, place = ocp.PyTreeCheckpointHandler(), cast(Any, directory / ADAPTER)
        about = handler.metadata(place).tree
        leaves = jax.tree.leaves(about)
        needed = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        dtypes = {str(np.dtype(leaf.dtype)) for leaf in leaves}
    except Exception as error:
        raise UserError(f"its item {ADAPTER!r} cannot be read ({_first_line(error)})") from None
    if needed > max_bytes:
        raise UserError(
            f"its factors take {needed:,} bytes, and {max_bytes:,} are allowed: see --max-bytes"
        )
    if dtypes != {schema.dtype}:
        raise UserError(
            f"its factors are {', '.join(sorted(dtypes)) or 'none'}, its schema says {schema.dtype}"
        )
    try:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), about)
        adapter = handler.restore(place, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    except Exception as error:
        raise UserError(
            f"its factors cannot be read ({_first_line(error)}): the checkpoint is damaged"
        ) from None
    # restored trees are not plain dicts
    flat = {path: np.asarray(leaf) for path, leaf in nested.leaves_with_path(adapter)}
    data = pack(nested.nest(flat), schema)
    if recorded.get("digest") not in (None, digest_of(data)):
        digests = digest_of(data)[:12], str(recorded["digest"])[:12]
        raise UserError(
            f"its factors have digest {digests[0]}, it says {digests[1]}: the checkpoint is damaged"
        )
    return data


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
