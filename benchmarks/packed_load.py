"""From file to device slot: one packed object against the same adapter as PEFT's tensors.

All sides read the same values from the page cache; ``packed`` also verifies its digest. Over it:
``ratio_packed``, one array per module of 37,248 tensors, stacked on the device;
``ratio_stacked_on_host``, stacked by numpy; ``ratio_672``, a file with stacked experts;
``ratio_peft_load_adapter``, PEFT's ``load_adapter`` of a small dense adapter. ``host_bytes_ratio``:
growth of memory over the bytes that the host cache counts.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.alone import alone, scratch
from benchmarks.decode_pause import decode_pause
from benchmarks.packed_files import Files
from benchmarks.packed_store import BASE, TARGETS, Store, adapter_of, forget, load, residency_of
from mint_jax import host
from mint_jax.catalog.packed import Schema, pack, unpack
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError, choice
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack, Slot
from mint_jax.models import hf, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.models.hf_config import from_hf
from mint_jax.residency.admission import Admission, verify
from mint_jax.residency.residency import Residency


def _loads(config: Any, files: Files) -> dict[str, Any]:
    """One adapter by four ways; three of them write a slot without residency."""
    [digest], bucket = files.digests[:1], files.config.bucket
    shapes = lora_tree.stack_specs(files.specs, TARGETS, bucket, 1)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.dtype(config.dtype)), shapes)
    slot = [AdapterStack(zeros, jnp.zeros((1,), jnp.float32), bucket)]
    write = jax.jit(lora_tree.write_slot, donate_argnums=0)
    residency = residency_of(files.store, files.specs, 1)
    reads = {"per_tensor": files.per_tensor, "stacked_on_host": files.read_unpacked}
    reads |= {"middle": files.read_middle}

    def plain(read: Callable[[], Any]) -> AdapterStack:
        adapter = jax.device_put(read())  # what is on the device already stays as it is
        scale = jnp.float32(files.config.scale)
        slot[0] = jax.block_until_ready(write(slot[0], jnp.int32(0), adapter, scale))
        return slot[0]

    sides: dict[str, Callable[[], Any]] = {
        name: functools.partial(plain, read) for name, read in reads.items()
    }
    sides["packed"] = functools.partial(_cold, residency, digest)
    times = timing.in_turn("file to slot", sides, config.n)
    [lease] = residency.wait_for([digest])
    ours = lora_tree.read_slot(residency.stacks[bucket], lease.slot.index)
    same = [
        jax.tree.map(jnp.array_equal, ours, lora_tree.read_slot(plain(read), 0))
        for read in reads.values()
    ]
    lease.release()
    residency.close()
    return {
        "ratio_packed": timing.ratio(times, "per_tensor", "packed"),
        "ratio_stacked_on_host": timing.ratio(times, "stacked_on_host", "packed"),
        "ratio_672": timing.ratio(times, "middle", "packed"),
        "load_ms": timing.median(times["packed"], 1e3),
        "seconds": timing.medians_of(times),
        "same_values": all(map(bool, jax.tree.leaves(same))),
    }


def _cold(residency: Residency, digest: str) -> None:
    """One cold load."""
    forget(residency, [digest])
    load(residency, [digest])


def _parts(config: Any, files: Files) -> dict[str, timing.Figure]:
    """Milliseconds of the stages of one cold load, each alone."""
    digest, bucket = files.digests[0], files.config.bucket
    residency = residency_of(files.store, files.specs, 1)
    slots = residency.slots
    admission = Admission(BASE, files.specs, {bucket: slots.targets(bucket)}, files.digests)
    buffer = files.store.fetch(digest)
    adapter, schema = unpack(buffer)

    def write() -> None:
        slots.write(slots.stage(Slot(bucket, 0), adapter, schema.config))
        jax.block_until_ready(slots.stacks)

    sides: dict[str, Callable[[], Any]] = {
        "fetch": lambda: files.store.fetch(digest),
        "touch": lambda: files.store.fetch(digest)[::4096].sum(),
        "verify": lambda: verify(digest, buffer, blake3_of),
        "unpack": lambda: unpack(buffer),
        "admit": lambda: admission.check(digest, adapter, schema),
        "stage_and_write": write,
    }
    times = timing.in_turn("parts", sides, config.n)
    residency.close()
    return timing.medians_of(times, 1e3)


def _host_bytes(config: Any, files: Files) -> dict[str, Any]:
    """Resident memory that a filled host cache takes, over the bytes it counts."""
    # each in a fresh process: no freed memory hides what is taken
    fills = [
        alone(_fill_host, files.store.folder, files.cfg, files.digests)
        for _ in range(config.host_fills)
    ]
    return {
        "host_bytes_ratio": timing.median(grown / counted for grown, counted in fills),
        "host_bytes": fills[0][1],
    }


def _fill_host(folder: str, cfg: ModelConfig, digests: list[str]) -> tuple[int, int]:
    """Growth of resident memory, and bytes counted, while revisions fill the host cache behind a
    slot that is taken.
    """
    store = Store(folder)
    store.lease(digests)
    residency = residency_of(store, transformer.abstract(cfg), 1, depth=len(digests))
    first, *rest = digests
    residency.wait_for([first])  # its lease keeps the only slot: the rest stay on the host
    before, counted = host.rss_bytes(), residency.host.size
    for digest in rest:
        residency.prefetch(digest)
    while residency.state()["loads"]["unfinished"]:
        time.sleep(0.01)
    grown, counted = host.rss_bytes() - before, residency.host.size - counted
    residency.close()
    return grown, counted


def _against_peft(config: Any, folder: Path) -> dict[str, Any]:
    """PEFT's own ``load_adapter`` of a small dense adapter against ours, both from files."""
    try:
        import torch
        import transformers
        from peft import PeftModel
    except ImportError as error:
        return {"peft": f"not measured: {error}"}
    size = config.peft
    heads = size.d_model // 64 or 1
    llama = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=256,
        hidden_size=size.d_model,
        intermediate_size=3 * size.d_model,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    cfg = from_hf(llama.to_dict())
    specs = transformer.abstract(cfg)
    adapter_config = AdapterConfig(size.rank, 2.0 * size.rank, TARGETS)
    wanted = lora_tree.adapter_specs(specs, adapter_config)
    adapter = adapter_of(wanted, np.random.default_rng(config.seed), "float32")
    path, names = folder / "peft", hf.module_names(cfg, lora_tree.projections(specs, TARGETS))
    peft.write_peft(path, adapter, adapter_config, names)
    store = Store(folder / "dense")
    [digest] = store.add([pack(adapter, Schema(BASE, adapter_config, "float32"))])
    residency = residency_of(store, specs, 1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama)
    model = PeftModel.from_pretrained(model, path, adapter_name="first")

    def theirs() -> None:
        model.load_adapter(path, adapter_name="second")
        model.delete_adapter("second")

    ours = functools.partial(_cold, residency, digest)
    times = timing.in_turn("PEFT load_adapter", {"peft": theirs, "ours": ours}, config.n)
    residency.close()
    return {
        "ratio_peft_load_adapter": timing.ratio(times, "peft", "ours"),
        "peft_load_ms": timing.medians_of(times, 1e3),
        "peft_bytes": store.nbytes([digest]),
    }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. The files it makes are removed."""
    if config.n < 5:
        raise UserError(f"n is {config.n}; medians need at least 5")
    report: dict[str, Any] = {"cores": os.cpu_count()}
    with scratch(workdir / "packed_load") as folder:
        files = Files(config, folder)
        report |= {
            "shape": config.shape.to_dict(),
            "tensors": files.tensors,
            "file_bytes": {
                "unpacked": files.unpacked.stat().st_size,
                "middle": files.middle.stat().st_size,
                "packed": files.store.nbytes(files.digests[:1]),
            },
        }
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "loads": lambda: _loads(config, files),
            "stages": lambda: {"parts_ms": _parts(config, files)},
            "host": lambda: _host_bytes(config, files),
            "pause": lambda: decode_pause(config, files),
            "peft": lambda: _against_peft(config, folder),
        }
        if unknown := [name for name in config.parts if name not in parts]:
            raise choice("a part", unknown[0], parts)
        for name in config.parts:
            report |= parts[name]()
    return report
