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

from benchmarks import timing, train_wave
from benchmarks.alone import scratch
from benchmarks.bases import open_base, random_base
from benchmarks.bases import shape as shape_of
from mint_jax import params as params_lib
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.errors import UserError, choice
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack
from mint_jax.models import hf
from mint_jax.models.base import Base
from mint_jax.models.precision import as_stored
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
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
    """The four handoffs of one base, each returning the base and stacks to sample with. Catalog and
    checkpoints are in ``folder``: a catalog holds adapters of a policy for one base only.
    """

    def __init__(self, base: Base, rank: int, folder: Path):
        self.base, self.folder = base, folder
        adapter = AdapterConfig(rank, 2.0 * rank)
        policy = PolicyConfig(POLICY, adapter, loss=LossConfig("cross_entropy"))
        self.trainer = Trainer(base, [policy])
        self.slot = self.trainer.slots[POLICY]
        self.serving, _ = lora_tree.stack_adapters(
            self.trainer.specs, {POLICY: (adapter, self.trainer.adapter(POLICY))}
        )
        self.flip = jax.jit(_flip, donate_argnums=1)
        self.place = jax.jit(lora_tree.write_slot, donate_argnums=0)
        self.schema = Schema(base.fingerprint, adapter)
        self.bytes: dict[str, int] = {}
        self.catalog = Catalog.open(folder / "catalog")
        self.exports = 0

    def step(self, rng: np.random.Generator) -> None:
        """One optimizer step, done when it returns."""
        row = train_wave.group(rng.integers(3, self.base.cfg.vocab_size, 16).tolist())
        train_wave.step(self.trainer, {POLICY: [row]})()

    def adapter_memory(self) -> tuple[Base, Any]:
        bucket, index = self.slot.bucket, jnp.int32(self.slot.index)
        self.serving[bucket] = self.flip(self.trainer.stacks[bucket], self.serving[bucket], index)
        self.bytes["adapter_memory"] = params_lib.nbytes(self.trainer.adapter(POLICY))
        return self.base, jax.block_until_ready(self.serving)

    def adapter_disk(self) -> tuple[Base, Any]:
        data, bucket = pack(self.trainer.adapter(POLICY), self.schema), self.slot.bucket
        revision = self.catalog.export(POLICY, data, self.exports, create=True)
        self.exports += 1
        adapter, schema = unpack(self.catalog.load(revision.digest))
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
        hf.save(self._merged(), cfg, folder)
        file = folder / "model.safetensors"
        with open(file, "rb+") as handle:
            os.fsync(handle.fileno())
        self.bytes["merged_disk"] = file.stat().st_size
        params = hf.load(folder, cfg, self.base.mesh, self.base.dtype)
        return dataclasses.replace(self.base, params=params), None


def _flip(source: AdapterStack, target: AdapterStack, slot: jax.Array) -> AdapterStack:
    """Copies a slot of one stack into slot 0 of another, on the device."""
    copied = jax.tree.map(lambda t, s: t.at[:, 0].set(s[:, slot]), target.factors, source.factors)
    scale = target.scale.at[0].set(source.scale[slot])
    return dataclasses.replace(target, factors=copied, scale=scale)


PATHS = ("merged_disk", "merged_memory", "adapter_disk", "adapter_memory")


def _measure(
    config: Any, base: Base, rank: int, tokens: tuple[int, ...], folder: Path, what: str
) -> dict[str, Any]:
    """All paths of one base, in turn after the same optimizer step."""
    rng = np.random.default_rng(config.seed)
    prompt = tuple(rng.integers(3, base.cfg.vocab_size, config.prompt).tolist())
    names = ("handoff", "first", *tokens)
    times: dict[Any, dict[str, list[float]]] = {n: {p: [] for p in PATHS} for n in names}
    same = True
    with scratch(folder), contextlib.closing((paths := _Paths(base, rank, folder)).catalog):
        slot = lora_tree.Slot(paths.slot.bucket, 0)

        def sample(engine: Engine, stacks: Any, count: int) -> list[int]:
            named = slot if stacks is not None else None
            request = Request(prompt, named, max_tokens=count, temperature=0.0)
            return engine.generate([request], stacks)[0][0].tokens

        for k in timing.counted(what, range(config.n + 1)):  # the first round compiles and warms
            paths.step(rng)
            said = set()
            for path in PATHS:
                began = time.perf_counter()
                own, stacks = getattr(paths, path)()
                found: dict[Any, float] = {"handoff": time.perf_counter() - began}
                engine = Engine(own)
                said.add(tuple(sample(engine, stacks, 1)))
                found["first"] = time.perf_counter() - began
                for count in tokens:
                    since = time.perf_counter()
                    sample(engine, stacks, count)
                    found[count] = found["handoff"] + time.perf_counter() - since
                for name, seconds in found.items():
                    times[name][path] += [seconds][: k > 0]
                del own, engine
            same &= len(said) == 1

    def ratio(name: Any) -> timing.Figure:
        return timing.ratio(times[name], "merged_disk", "adapter_memory")

    return {
        "new_tokens": tokens[0],
        "handoff_ratio": ratio("handoff"),
        "first_token_ratio": ratio("first"),
        "step_ratio": ratio(tokens[0]),
        "ratios": _over_each(times["handoff"]),
        "handoff_s": timing.medians_of(times["handoff"]),
        "to_first_token_s": timing.medians_of(times["first"]),
        "handoff_and_tokens_s": timing.medians_of(times[tokens[0]]),
        "steps": {
            str(count): {
                "seconds": timing.medians_of(times[count]),
                "ratios": _over_each(times[count]),
            }
            for count in tokens
        },
        "bytes": paths.bytes,
        "base_bytes": base.nbytes,
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
