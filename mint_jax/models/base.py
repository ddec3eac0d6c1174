"""The resident base: resolves a name to a checkpoint directory, and loads it onto a mesh."""

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.data.tokenizer import Tokenizer
from mint_jax.errors import UserError, choice
from mint_jax.files import new_directory
from mint_jax.models import gguf, hf, layout, quantised, stored, transformer
from mint_jax.models import names as base_names
from mint_jax.models.config import Kernels, ModelConfig
from mint_jax.models.hf_config import from_hf
from mint_jax.models.names import PACKAGED, RANDOM, cache_dir
from mint_jax.params import ParamSpec

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Base:
    """One frozen base model, resident on a mesh."""

    name: str
    directory: Path
    cfg: ModelConfig = dataclasses.field(repr=False)
    params: Any = dataclasses.field(repr=False)  # the frozen tree; never written
    mesh: Mesh = dataclasses.field(repr=False)
    # None for a directory without one (token ids only)
    tokenizer: Tokenizer | None = dataclasses.field(repr=False)
    fingerprint: str  # hex digest that names this base in revisions

    @property
    def dtype(self) -> Any:
        """Compute dtype: that of the final norm, since projections may be stored in fewer bits."""
        return self.params["final_norm"].dtype

    @property
    def weights(self) -> str:
        """Storage of the matrices, for reports: ``blocks``, see ``stored.py``, or dtypes."""
        kinds = {
            leaf.dtype.name
            for path, leaf in params_lib.leaves_with_path(self.params)
            if path.endswith("/w")
        }
        return "blocks" if "uint8" in kinds else " and ".join(sorted(kinds))

    @property
    def nbytes(self) -> int:
        return params_lib.nbytes(self.params)

    @property
    def full_bytes(self) -> int:
        return params_lib.count(transformer.abstract(self.cfg)) * self.dtype.itemsize

    @property
    def row_multiple(self) -> int:
        """Number that batch rows are a multiple of: the ways in which the mesh splits them."""
        return sharding.ways("batch", self.mesh)

    def need_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises ``UserError`` if there is none."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.directory} has no tokenizer.json: give token ids instead of text or"
                " messages"
            )
        return self.tokenizer


def resolve(name: str) -> Path:
    """Returns the checkpoint directory of a base name: a directory, a packaged model, a hub
    repository, or random weights, whose directory has none. Raises ``UserError``, saying what
    was tried.
    """
    base_names.check(name)
    if Path(name).is_dir():
        return Path(name)
    if base_names.is_random(name):
        return _outline_of_random(name)
    if (packaged := name.lower()) in PACKAGED:
        target = cache_dir() / "bases" / packaged
        if (target / stored.FILE).is_file():
            return target
        return gguf.convert(base_names.need_package(packaged) / PACKAGED[packaged][2], target)
    if name.lower() in RANDOM:
        return _make_random(name.lower())
    instead = f", or use a local directory or one of: {', '.join(PACKAGED)}"
    what, files = f"base {name!r} is not a local directory", ["*.json", "*.safetensors", "*.jinja"]
    return download(name, what, files, instead)


def public_name(name: str) -> str:
    """Returns the name by which other programs open a base: an absolute directory or a hub name."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if base_names.is_random(name):
        raise UserError(
            f"base {name!r} is made on the devices and is in no file that another program could"
            " read: use a checkpoint"
        )
    if name.lower() in PACKAGED:
        return PACKAGED[name.lower()][3]
    return str(resolve(name)) if name.lower() in RANDOM else name


def _make_random(name: str) -> Path:
    cfg = from_hf(RANDOM[name])

    def weights(folder: Path) -> None:
        hf.save(params_lib.init(transformer.abstract(cfg), jax.random.key(0)), cfg, folder)

    return _outlined(name, RANDOM[name], lambda: resolve(next(iter(PACKAGED))), weights)


def _outline_of_random(name: str) -> Path:
    """Returns a directory with the ``config.json`` of random weights and perhaps a tokenizer."""
    fields, own = base_names.shape(name), Path(name[len(base_names.PREFIX) :])

    def donor() -> Path:
        try:
            return own if (own / "tokenizer.json").is_file() else resolve(next(iter(PACKAGED)))
        except UserError:  # the package is not installed: token ids only
            return own

    return _outlined(f"random-{_fingerprint_of_shape(fields)[:16]}", fields, donor)


def _outlined(
    name: str,
    fields: dict[str, Any],
    donor: Callable[[], Path],
    weights: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Returns a cached directory with ``config.json``, the tokenizer of ``donor`` and weights."""
    target = cache_dir() / "bases" / name
    if (target / "config.json").is_file():
        return target
    source = donor()
    with new_directory(target, "config.json") as staging:
        weights(staging)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if (source / file).is_file():
                shutil.copy(source / file, staging / file)
        (staging / "config.json").write_text(json.dumps(fields, indent=1))
    return target


def download(name: str, what: str, files: list[str], instead: str = "") -> Path:
    """Returns the cached folder of a hub repository's files. Raises ``UserError``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{what}, and the hub did not return it ({reason}): check the name and the network"
            f"{instead}"
        ) from None


def load(
    name: str,
    mesh: Mesh,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
    quantise: str = "",
    kernels: Kernels = Kernels(),
    as_stored: bool = True,
) -> Base:
    """Resolves and loads a base.

    Args:
        dtype: ``float32`` or ``bfloat16``, storage and compute dtype.
        quantise: ``int8`` or ``float8`` stores the layers' matrices in 8 bits, see
            ``quantised.py``.
        as_stored: keep weights in the checkpoint's bits where possible, see ``stored.py``.

    Raises:
        UserError: see ``resolve`` and ``hf.load``; a tokenizer with more ids than the model has
            rows.
    """
    if dtype not in DTYPES:
        raise choice("dtype", dtype, DTYPES)
    if quantise and quantise not in quantised.KINDS:
        raise choice("quantise", quantise, ["", *quantised.KINDS])
    directory = resolve(name)
    cfg = layout.read_model(directory).replace(kernels=kernels)
    tokenizer = Tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise UserError(
            f"the tokenizer in {directory} has ids up to {tokenizer.vocab_size - 1} but the model"
            f" has {cfg.vocab_size} rows: tokenizer and weights do not match"
        )
    if base_names.is_random(name):
        params = random_params(cfg, mesh, DTYPES[dtype], quantise, progress)
    elif layout.is_converted(directory):
        specs = transformer.abstract(cfg, DTYPES[dtype], quantise)
        params = layout.load(directory, specs, mesh, DTYPES[dtype], quantise, progress)
    else:
        settings = DTYPES[dtype], quantise, list(mesh.devices.flat), kernels.layer_matmul
        as_stored = as_stored and not stored.reason_against(*settings)
        params = hf.load(directory, cfg, mesh, DTYPES[dtype], progress, quantise, as_stored)
    return Base(name, directory, cfg, params, mesh, tokenizer, fingerprint(name, directory))


def fingerprint(name: str, directory: Path) -> str:
    """Returns the hex digest of a base, by its name and its resolved directory. A conversion has
    that of its source.
    """
    if base_names.is_random(name):
        return _fingerprint_of_shape(base_names.shape(name))
    if layout.is_converted(directory):
        return layout.read_manifest(directory)["fingerprint"]
    return hf.fingerprint(directory)


def _fingerprint_of_shape(fields: dict[str, Any]) -> str:
    """Returns a hex digest that identifies random weights of this shape, and no trained base."""
    named = json.dumps(fields, sort_keys=True).encode()
    return hashlib.sha256(b"random weights of seed 0 " + named).hexdigest()


def random_params(
    cfg: ModelConfig,
    mesh: Mesh,
    dtype: Any,
    quantise: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> params_lib.Tree:
    """Makes random parameters on the devices; the same on every mesh of a platform."""
    specs = transformer.abstract(cfg, dtype, quantise)
    plain = dict(params_lib.leaves_with_path(transformer.abstract(cfg, dtype)))

    def leaf(path: str, spec: ParamSpec) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(0), params_lib.path_seed(path))
        # 8-bit weights are drawn as integers, so the full matrix never exists.
        make = spec.materialise
        if quantise and (path not in plain or plain[path].dtype != spec.dtype):
            make = functools.partial(
                _in_8_bits, plain[f"{path.rpartition('/')[0]}/w"], spec, quantise
            )
        return jax.jit(make, out_shardings=sharding.sharding_of(spec, mesh))(key)

    return hf.one_by_one(leaf, specs, progress)


def _in_8_bits(plain: ParamSpec, spec: ParamSpec, kind: str, key: jax.Array) -> jax.Array:
    """Returns a quantised matrix or its scales; the largest number is four standard deviations."""
    top, deviations = quantised.KINDS[kind][1], 4
    if spec.dtype == jnp.float32:
        fan_in = plain.fan_in if plain.fan_in is not None else plain.shape[-2]
        return jnp.full(spec.shape, deviations / top * fan_in**-0.5, jnp.float32)
    drawn = jnp.clip(jax.random.normal(key, spec.shape) * (top / deviations), -top, top)
    return (jnp.round(drawn) if jnp.issubdtype(spec.dtype, jnp.integer) else drawn).astype(
        spec.dtype
    )
