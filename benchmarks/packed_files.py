"""Writes one adapter in several layouts on disk, and reads those that are not packed."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.bases import shape as shape_of
from benchmarks.packed_store import BASE, TARGETS, Store
from mint_jax import params as params_lib
from mint_jax.catalog.packed import Schema, pack
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import hf, transformer


class Files:
    """One adapter in all its forms on disk."""

    def __init__(self, config: Any, folder: Path):
        self.cfg = shape_of(config.shape)
        self.specs = transformer.abstract(self.cfg)
        self.config = AdapterConfig(config.rank, 2.0 * config.rank, TARGETS)
        specs = lora_tree.adapter_specs(self.specs, self.config)
        self._wanted = dict(params_lib.leaves_with_path(specs))
        count = params_lib.count(specs)
        values = np.random.default_rng(config.seed).standard_normal(count, np.float32)
        self._values = values.astype(jnp.dtype(config.dtype))
        self.store = Store(folder / "catalog")
        schema = Schema(BASE, self.config, config.dtype)
        self.digests = self.store.add(pack(self.adapter(i), schema) for i in range(config.distinct))
        self._names = hf.module_names(self.cfg, lora_tree.projections(self.specs, TARGETS))
        peft.write_peft(folder / "unpacked", self.adapter(0), self.config, self._names)
        self.unpacked = folder / "unpacked" / peft.WEIGHTS
        self.middle = folder / "middle.safetensors"
        leaves = params_lib.leaves_with_path(self.adapter(0))
        middle = {f"{path}/{i}": row for path, leaf in leaves for i, row in enumerate(leaf)}
        save_file(middle, self.middle)
        self.tensors = {
            "unpacked": 2 * sum(map(len, self._names.values())),
            "middle": len(middle),
            "packed": len(self._wanted),
        }

    def adapter(self, i: int) -> Any:
        """The i-th of the distinct adapters: the same numbers, moved on by i."""
        ends = np.cumsum([spec.size for spec in self._wanted.values()])
        parts = np.split(np.roll(self._values, i), ends[:-1])
        shaped = zip(self._wanted.items(), parts)
        return params_lib.nest({path: part.reshape(spec.shape) for (path, spec), part in shaped})

    def _peft(self) -> Iterator[tuple[str, tuple[int, ...], list[str], bool]]:
        """Yields path and shape of each factor, the names of its tensors in PEFT's file, and true
        if PEFT stores them the other way round.
        """
        for path, spec in self._wanted.items():
            module, _, factor = path.rpartition("/")
            own = [f"base_model.model.{m}.lora_{factor.upper()}" for m in self._names[module]]
            yield path, spec.shape, [f"{name}.weight" for name in own], factor == "b"

    def read_unpacked(self) -> Any:
        """PEFT's file, stacked on the host."""
        tensors, flat = load_file(self.unpacked), {}
        for path, shape, names, turned in self._peft():
            own = [tensors[name].T if turned else tensors[name] for name in names]
            flat[path] = np.stack(own).reshape(shape)
        return params_lib.nest(flat)

    def per_tensor(self) -> Any:
        """PEFT's file, one device array a tensor, then stacked on the device."""
        arrays, flat = jax.device_put(load_file(self.unpacked)), {}
        for path, shape, names, turned in self._peft():
            each = len(names) // shape[0]  # of a layer: experts, or one
            own = [arrays[name] for name in names]
            rows = [stack(own[i : i + each], turned) for i in range(0, len(own), each)]
            flat[path] = stack(rows, False).reshape(shape)
        return params_lib.nest(flat)

    def read_middle(self) -> Any:
        """The file with one tensor per layer, projection and factor."""
        tensors, flat = load_file(self.middle), {}
        for path, spec in self._wanted.items():
            flat[path] = np.stack([tensors[f"{path}/{i}"] for i in range(spec.shape[0])])
        return params_lib.nest(flat)


@functools.partial(jax.jit, static_argnames="transpose")
def stack(arrays: list[jax.Array], transpose: bool) -> jax.Array:
    """One array of equal ones, in one call; PEFT stores B the other way round."""
    stacked = jnp.stack(arrays)
    return stacked.swapaxes(-1, -2) if transpose else stacked
