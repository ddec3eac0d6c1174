"""From an optimizer step to the next sampled token, by four paths.

``merged_disk``: merge, write a checkpoint, sync, read it back. ``merged_memory``: merge on the
device. ``adapter_disk``: export a revision, sync, read and verify it, write it to a slot.
``adapter_memory``: copy the training slot to a sampling slot. ``handoff_ratio`` compares
``merged_disk`` with ``adapter_memory``, ``step_ratio`` the handoff and 64 tokens, ``ratios``
``merged_disk`` with every path.
"""

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.bases import open_base, random_base
from benchmarks.bases import shape as shape_of
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError, choice
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.metrics import Progress
from mint_jax.models import hf
from mint_jax.models.base import Base
from mint_jax.models.precision import as_stored
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.trainer import Trainer

POLICY = "policy"


@jax.jit
@as_stored
def merged(params: Any, stack: AdapterStack, slot: jax.Array) -> Any:
    """A second copy of the base with one slot's deltas added, ``W + scale A^T B`` (``unembed`` and
    ``embed`` left alone).
    """
    if any(w.ndim > 1 and w.dtype != params["final_norm"].dtype for w in jax.tree.leaves(params)):
        raise UserError(
            "merged weights need the base's in full: set as_stored to False and quantise to ''"
        )
    factors = dict(params_lib.leaves_with_path(stack.factors))

    def leaf(path: str, w: jax.Array) -> jax.Array:
        owner = path.removesuffix("/w")
        if f"{owner}/a" not in factors or w.ndim < 3:
            return w + jnp.zeros((), w.dtype)  # a copy: the baseline's weights are all its own
        a, b = factors[f"{owner}/a"][:, slot], factors[f"{owner}/b"][:, slot]
        delta = jnp.einsum("L...RD,L...RF->L...DF", a, b, preferred_element_type=jnp.float32)
        return (w.astype(jnp.float32) + stack.scale[slot] * delta).astype(w.dtype)

    return params_lib.map_with_path(leaf, params)


class _Paths:
    """The four handoffs of one base, each returning the base and stacks to sample with."""

    def __init__(self, base: Base, rank: int, folder: Path):
        self.base, self.folder = base, folder
        adapter = AdapterConfig(rank, 2.0 * rank)
        self.trainer = Trainer(
            base, [PolicyConfig(POLICY, adapter, loss=LossConfig("cross_entropy"))]
        )
        self.slot = self.trainer.slots[POLICY]
        self.serving, _ = lora_tree.stack_adapters(
            self.trainer.specs, {POLICY: (adapter, self.trainer.adapter(POLICY))}
        )
        self.flip = jax.jit(self._flip, donate_argnums=1)
        self.place = jax.jit(lora_tree.write_slot, donate_argnums=0)
        self.schema = Schema(base.fingerprint, adapter)
        self.bytes: dict[str, int] = {}
        self.catalog = Catalog.open(self.folder / "catalog")
        self.exported: list[str] = []

    @staticmethod
    def _flip(source: Any, target: Any, slot: jax.Array) -> Any:
        """Copies a slot of one stack into slot 0 of another, on the device."""
        copied = jax.tree.map(
            lambda t, s: t.at[:, 0].set(s[:, slot]), target.factors, source.factors
        )
        return dataclasses.replace(
            target, factors=copied, scale=target.scale.at[0].set(source.scale[slot])
        )

    def step(self, rng: np.random.Generator) -> None:
        """One optimizer step, done when it returns."""
        tokens = rng.integers(3, self.base.cfg.vocab_size, 16).tolist()
        self.trainer.update(
            {POLICY: [Group(tokens[:1], [TrainSequence(tokens[1:], [1 / 15] * 15)])]}
        )
        jax.block_until_ready(self.trainer.state)

    def adapter_memory(self) -> tuple[Base, Any]:
        source = self.trainer.stacks[self.slot.bucket]
        self.serving[self.slot.bucket] = self.flip(
            source, self.serving[self.slot.bucket], jnp.int32(self.slot.index)
        )
        self.bytes["adapter_memory"] = params_lib.nbytes(self.trainer.adapter(POLICY))
        return self.base, jax.block_until_ready(self.serving)

    def adapter_disk(self) -> tuple[Base, Any]:
        data = pack(self.trainer.adapter(POLICY), self.schema)
        revision = self.catalog.export(POLICY, data, len(self.exported), create=True)
        self.exported.append(revision.digest)
        adapter, schema = unpack(self.catalog.load(revision.digest))
        bucket = self.slot.bucket
        scale = jnp.float32(schema.config.scale)
        self.serving[bucket] = self.place(self.serving[bucket], jnp.int32(0), adapter, scale)
        self.bytes["adapter_disk"] = len(data)
        return self.base, jax.block_until_ready(self.serving)

    def _merged(self) -> Any:
        stack, slot = self.trainer.stacks[self.slot.bucket], jnp.int32(self.slot.index)
        return jax.block_until_ready(merged(self.base.params, stack, slot))

    def merged_memory(self) -> tuple[Base, Any]:
        params = self._merged()
        self.bytes["merged_memory"] = params_lib.nbytes(params)
        return dataclasses.replace(self.base, params=params), None

    def merged_disk(self) -> tuple[Base, Any]:
        cfg, folder = self.base.cfg, self.folder / "merged"
        params = self._merged()
        hf.save(params, cfg, folder)
        del params
        file = folder / "model.safetensors"
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        self.bytes["merged_disk"] = file.stat().st_size
        params = hf.load(folder, cfg, self.base.mesh, self.base.dtype)
        return dataclasses.replace(self.base, params=params), None


PATHS = ("merged_disk", "merged_memory", "adapter_disk", "adapter_memory")


def _measure(
    config: Any, base: Base, rank: int, tokens: tuple[int, ...], folder: Path, what: str
) -> dict[str, Any]:
    """All paths of one base, whose catalog and checkpoints are its own: a catalog holds adapters of
    a policy for one base only.
    """
    with scratch(folder):
        paths = _Paths(base, rank, folder)
        with contextlib.closing(paths.catalog):
            return _in_turn(config, paths, tokens, what)


def _in_turn(config: Any, paths: _Paths, tokens: tuple[int, ...], what: str) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    prompt = tuple(rng.integers(3, paths.base.cfg.vocab_size, config.prompt).tolist())
    handoff: dict[str, list[float]] = {name: [] for name in PATHS}
    first: dict[str, list[float]] = {name: [] for name in PATHS}
    whole: dict[int, dict[str, list[float]]] = {
        count: {name: [] for name in PATHS} for count in tokens
    }
    same = True
    progress = Progress(what, config.n + 1)
    for k in range(config.n + 1):  # the first round compiles and warms
        paths.step(rng)
        said = set()
        for name in PATHS:
            began = time.perf_counter()
            base, stacks = getattr(paths, name)()
            ready = time.perf_counter()
            slot = lora_tree.Slot(paths.slot.bucket, 0) if stacks is not None else None
            engine = Engine(base)
            token = engine.generate([Request(prompt, slot, max_tokens=1, temperature=0.0)], stacks)
            sampled = time.perf_counter()
            for count in tokens:
                since = time.perf_counter()
                engine.generate([Request(prompt, slot, max_tokens=count, temperature=0.0)], stacks)
                if k:
                    whole[count][name].append(ready - began + time.perf_counter() - since)
            said.add(token[0][0].tokens[0])
            if k:
                handoff[name].append(ready - began)
                first[name].append(sampled - began)
            del base, engine
        same &= len(said) == 1
        progress.update(
            k + 1,
            " ".join(f"{name} {values[-1]:.3f} s" for name, values in handoff.items() if values),
        )

    new_tokens = tokens[0]
    return {
        "new_tokens": new_tokens,
        "handoff_ratio": timing.ratio(handoff, "merged_disk", "adapter_memory"),
        "first_token_ratio": timing.ratio(first, "merged_disk", "adapter_memory"),
        "step_ratio": timing.ratio(whole[new_tokens], "merged_disk", "adapter_memory"),
        "ratios": _over_each(handoff),
        "handoff_s": timing.medians_of(handoff),
        "to_first_token_s": timing.medians_of(first),
        "handoff_and_tokens_s": timing.medians_of(whole[new_tokens]),
        "steps": {
            str(count): {"seconds": timing.medians_of(times), "ratios": _over_each(times)}
            for count, times in whole.items()
        },
        "bytes": dict(paths.bytes),
        "base_bytes": paths.base.nbytes,
        "same_first_token": same,
    }


def _over_each(times: dict[str, list[float]]) -> dict[str, timing.Figure]:
    """Returns the time of the merged checkpoint through disk over each path's."""
    return {name: timing.ratio(times, "merged_disk", name) for name in PATHS}


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The keys at the top are those of the base that the config
    names.
    """
    if unknown := sorted({*config.parts} - {"base", "large"}):
        raise choice("a part", unknown[0], ("base", "large"))
    report: dict[str, Any] = {}
    if "base" in config.parts:
        base = open_base(config)
        tokens = (config.new_tokens, *config.more_tokens)
        report |= {"base": base.name} | _measure(
            config, base, config.rank, tokens, workdir / "handoff", base.name
        )
        del base
    if "large" not in config.parts:
        return report
    shape = config.shape
    large = random_base(shape_of(shape), jnp.dtype(shape.dtype))
    name = f"{shape.name}, {shape.layers} of {shape.all_layers} layers"
    tokens = (shape.new_tokens, *shape.more_tokens)
    found = _measure(config, large, shape.rank, tokens, workdir / "handoff_large", name)
    return report | {"large": {"base": name, "dtype": shape.dtype} | found}
