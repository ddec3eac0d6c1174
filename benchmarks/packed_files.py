"""Writes one adapter in several layouts on disk, and reads those that are not packed."""

import functools
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
        self.wanted = lora_tree.adapter_specs(self.specs, self.config)
        dtype = jnp.dtype(config.dtype)
        self._values = (
            np.random.default_rng(config.seed)
            .standard_normal(params_lib.count(self.wanted), np.float32)
            .astype(dtype)
        )
        self.store = Store(folder / "catalog")
        schema = Schema(BASE, self.config, config.dtype)
        self.digests = self.store.add(pack(self.adapter(i), schema) for i in range(config.distinct))
        self.names = hf.module_names(self.cfg, lora_tree.projections(self.specs, TARGETS))
        peft.write_peft(folder / "unpacked", self.adapter(0), self.config, self.names)
        self.unpacked = folder / "unpacked" / peft.WEIGHTS
        self.middle = folder / "middle.safetensors"
        middle = {
            f"{path}/{i}": row
            for path, leaf in params_lib.leaves_with_path(self.adapter(0))
            for i, row in enumerate(leaf)
        }
        save_file(middle, self.middle)
        self.tensors = {
            "unpacked": 2 * sum(map(len, self.names.values())),
            "middle": len(middle),
            "packed": len(self.paths()),
        }

    def paths(self) -> list[str]:
        return [path for path, _ in params_lib.leaves_with_path(self.wanted)]

    def adapter(self, i: int) -> Any:
        """The i-th of the distinct adapters: the same numbers, moved on by i."""
        flat, at, values = {}, 0, np.roll(self._values, i)
        for path, spec in params_lib.leaves_with_path(self.wanted):
            flat[path] = values[at : at + spec.size].reshape(spec.shape)
            at += spec.size
        return params_lib.nest(flat)

    def read_unpacked(self) -> Any:
        """PEFT's file, stacked on the host."""
        tensors = load_file(self.unpacked)
        flat = {}
        for path, modules in self.names.items():
            stack = at(self.wanted, path)
            flat[f"{path}/a"] = np.stack(
                [tensors[f"base_model.model.{m}.lora_A.weight"] for m in modules]
            ).reshape(stack["a"].shape)
            flat[f"{path}/b"] = np.stack(
                [tensors[f"base_model.model.{m}.lora_B.weight"].T for m in modules]
            ).reshape(stack["b"].shape)
        return params_lib.nest(flat)

    def per_tensor(self) -> Any:
        """PEFT's file, one device array a tensor, then stacked on the device."""
        arrays = jax.device_put(load_file(self.unpacked))
        flat = {}
        for path, modules in self.names.items():
            layers = at(self.wanted, path)["a"].shape[0]
            each = len(modules) // layers  # experts, or one
            for factor, letter in (("a", "A"), ("b", "B")):
                own = [arrays[f"base_model.model.{m}.lora_{letter}.weight"] for m in modules]
                parts = [own[i * each : (i + 1) * each] for i in range(layers)]
                rows = [stack(part, factor == "b") for part in parts]
                flat[f"{path}/{factor}"] = stack(rows, False).reshape(
                    at(self.wanted, path)[factor].shape
                )
        return params_lib.nest(flat)

    def read_middle(self) -> Any:
        """The file with one tensor per layer, projection and factor."""
        tensors = load_file(self.middle)
        layers = {path: spec.shape[0] for path, spec in params_lib.leaves_with_path(self.wanted)}
        stacks = {p: np.stack([tensors[f"{p}/{i}"] for i in range(n)]) for p, n in layers.items()}
        return params_lib.nest(stacks)


def adapter_of(wanted: Any, rng: np.random.Generator, dtype: str) -> Any:
    """A random adapter of these specs."""
    return jax.tree.map(
        lambda spec: rng.standard_normal(spec.shape, np.float32).astype(jnp.dtype(dtype)), wanted
    )


def at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


@functools.partial(jax.jit, static_argnames="transpose")
def stack(arrays: list[jax.Array], transpose: bool) -> jax.Array:
    """One array of equal ones, in one call; PEFT stores B the other way round."""
    stacked = jnp.stack(arrays)
    return stacked.swapaxes(-1, -2) if transpose else stacked
