"""A base in the layout of a mesh: TensorStore arrays whose chunks are the mesh's shards.

A safetensors checkpoint has one tensor per layer and expert, so that every host reads all files. In
this layout a host reads its own shards. Chunks carry checksums. ``write`` continues where it was
stopped; a directory without ``base.json`` is not complete.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import AbstractMesh, AxisType, Mesh

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.errors import UserError
from mint_jax.files import write_file
from mint_jax.mesh import AXES
from mint_jax.models import hf
from mint_jax.models.config import ModelConfig
from mint_jax.params import ParamSpec

MANIFEST, _PARTIAL = "base.json", "base.partial.json"
COPIED = ("*.json", "*.jinja", "*.model")  # config and tokenizer


def is_converted(directory: Path) -> bool:
    """Returns True for a directory that ``write`` has completed.

    Raises:
        UserError: a conversion that is not complete.
    """
    if (directory / MANIFEST).is_file():
        return True
    if (directory / _PARTIAL).is_file():
        raise UserError(
            f"{directory} is a conversion that is not complete: run the convert job again with the"
            " same settings; it continues"
        )
    return False


def read_model(directory: Path) -> ModelConfig:
    """Reads the config of a checkpoint or of a conversion. A conversion of tied weights that differ
    has both, see ``hf.read_model``.
    """
    cfg = hf.read_model(directory)
    if is_converted(directory) and "unembed/w" in read_manifest(directory)["leaves"]:
        return cfg.replace(tie_embeddings=False)
    return cfg


def shard_shape(spec: ParamSpec, sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns the shape of one shard on a mesh of these sizes, which need not exist here.

    Raises:
        UserError: the sizes do not divide the shape.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    mesh: Any = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return sharding.sharding_of(spec, mesh).shard_shape(spec.shape)


def write(
    source: Path,
    directory: Path,
    cfg: ModelConfig,
    sizes: dict[str, int],
    dtype: Any,
    quantise: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes the checkpoint ``source`` in the layout of a mesh, one shard in memory at a time.

    Args:
        sizes: mesh axis -> size.
        dtype, quantise: of the base, see ``hf.load``.
        progress: called with (bytes done, total bytes) after each parameter.

    Returns:
        Bytes of the parameters.

    Raises:
        UserError: see ``hf.reader``; the directory holds another conversion, or other files.
    """
    specs, reader = hf.reader(source, cfg, dtype, quantise)
    settings = {
        "fingerprint": hf.fingerprint(source),
        "mesh": {axis: sizes.get(axis, 1) for axis in AXES},
        "dtype": np.dtype(dtype).name,
        "quantise": quantise,
    }
    leaves = dict(params_lib.leaves_with_path(specs))
    chunks = {path: shard_shape(spec, sizes) for path, spec in leaves.items()}
    partial = directory / _PARTIAL
    done: list[str] = []
    if partial.is_file():
        found = json.loads(partial.read_text())
        done = found.pop("done")
        if found != settings:
            raise UserError(
                f"{directory} holds a conversion with other settings ({found}): choose another"
                " directory or delete it"
            )
    elif directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} is not empty: choose another directory for the conversion")
    total, finished = params_lib.nbytes(specs), 0
    write_file(partial, json.dumps(settings | {"done": done}))
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name not in (hf.INDEX, MANIFEST, _PARTIAL):
                shutil.copy(file, directory / file.name)
    for path, spec in leaves.items():
        if path not in done:
            _write_leaf(directory, path, spec, chunks[path], reader(path, spec))
            done.append(path)
            write_file(partial, json.dumps(settings | {"done": done}))
        finished += spec.nbytes
        if progress is not None:
            progress(finished, total)
    manifest = {
        path: [list(spec.shape), np.dtype(spec.dtype).name] for path, spec in leaves.items()
    }
    write_file(directory / MANIFEST, json.dumps(settings | {"leaves": manifest}, indent=1))
    partial.unlink()
    return total


def _write_leaf(
    directory: Path,
    path: str,
    spec: ParamSpec,
    chunk: tuple[int, ...],
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> None:
    store, size = _open(directory, path, spec, chunk), np.dtype(spec.dtype).itemsize
    axes = [[slice(at, at + c) for at in range(0, n, c)] for n, c in zip(spec.shape, chunk)]
    for index in itertools.product(*axes):
        # As integers of the same size: zarr has no name for every float.
        data = read(index).view(f"uint{8 * size}")
        store[index].write(data).result()
        if not np.array_equal(store[index].read().result(), data):
            raise OSError(f"{directory}: what was read of {path} is not what was written")


def _open(directory: Path, path: str, spec: ParamSpec, chunk: tuple[int, ...] | None) -> Any:
    """Opens one parameter's array; with ``chunk``, creates it."""
    request: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(directory / "arrays" / path) + "/"},
        # A chunk without a file is an error, not zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
    }
    if chunk is not None:
        grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        kind = f"uint{8 * np.dtype(spec.dtype).itemsize}"
        request["metadata"] = {"shape": list(spec.shape), "data_type": kind}
        request["metadata"] |= {"chunk_grid": grid, "codecs": codecs}
        request |= {"create": True, "delete_existing": True}
    return ts.open(request).result()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns settings and leaves of a conversion."""
    try:
        found = json.loads((directory / MANIFEST).read_text())
        if not isinstance(found["leaves"], dict) or not isinstance(found["fingerprint"], str):
            raise ValueError("it names no leaves")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{directory / MANIFEST} is damaged ({error!r}): convert the base again"
        ) from None
    return found


def load(
    directory: Path,
    specs: Any,
    mesh: Mesh,
    dtype: Any,
    quantise: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Reads a converted base into sharded device arrays; each process reads its shards.

    Args:
        specs: of the base in ``dtype`` and ``quantise``.

    Raises:
        UserError: converted with another dtype, for another model, or damaged.
    """
    manifest = read_manifest(directory)
    for name, wanted in (("dtype", np.dtype(dtype).name), ("quantise", quantise)):
        if manifest[name] != wanted:
            raise UserError(
                f"{directory} was converted with {name} {manifest[name]!r}, not {wanted!r}: set"
                f" --config.{name}={manifest[name]} or convert the base again"
            )

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        expected = [list(spec.shape), np.dtype(spec.dtype).name]
        if manifest["leaves"].get(path) != expected:
            raise UserError(
                f"{directory} holds {path} as {manifest['leaves'].get(path)}, but config.json needs"
                f" {expected}: convert the base again"
            )
        try:
            store = _open(directory, path, spec, None)
            return jax.make_array_from_callback(
                spec.shape,
                sharding.sharding_of(spec, mesh),
                lambda index: np.asarray(store[index or ...].read().result()).view(spec.dtype),
            )
        except ValueError as error:
            raise UserError(
                f"{directory}: {path} cannot be read ({str(error).splitlines()[0][:200]}): convert"
                " the base again"
            ) from None

    return hf.one_by_one(leaf, specs, progress)
