"""File to device slot: one packed object against the same adapter in PEFT's tensors, and what residency makes of many.

All sides read the same values from files in the page cache and end when the slot is written. ``packed`` goes through
``Residency`` from a payload store; it verifies the digest and checks the layout, which the other sides do not do (values are
searched for NaN when a catalog takes them in, and by no side here). It is compared with

- ``ratio_packed``: loading as an engine does that keeps one array a module, as PEFT and vLLM do: safetensors ``load_file`` of
  the 37,248 tensors, one device array for each (all handed over in one call), stacked on the device layer by layer into the
  packed factors, written to the slot. MinT's own unpacked path took 0.367 s to read such a file and 0.754 s to build an
  object for each tensor, on its machine and in PyTorch; that is quoted, not run.
- ``ratio_stacked_on_host``: the cleverest straightforward way from the same file: tensors of a projection are stacked by numpy
  on the host, and only the 14 stacks become device arrays.
- ``ratio_672``: the same from a file in which experts are stacked already, one tensor per layer, projection and factor.
- ``ratio_peft_load_adapter``: PEFT's real ``load_adapter`` into a torch model, of a small dense adapter (it finishes in
  seconds there), against ours of the same adapter.

``cold_over_1``: ``distinct`` cold revisions at once over one. All is in memory, so this is a matter of cores: 16 loads that
keep all cores busy, over one that keeps a single core busy, is ``cold_over_1_floor`` (from CPU times); where one load uses
all cores, which makes both sides faster, the ratio is up to ``cold_over_1_cpu``.

``host_bytes_ratio``: growth of resident memory over the bytes that the host cache counts. ``cpu_seconds``, and the
``cpu_ratio``s from them, are of all threads of the process: they hold also where others use the machine, which
``load_average`` tells of.

``decode_pause_p99``: the 99th percentile of a decode step of a small model, commit included, while cold loads go on, over
that without. Short windows of steps take turns: quiet, loading, and quiet once more; ``decode_noise_p99``, the second quiet
ones over the first, is what the machine makes of no difference at all.
"""

import functools
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict
from safetensors.numpy import load_file, save_file

from mint_jax import host
from mint_jax import mesh as mesh_lib
from mint_jax import params as params_lib
from mint_jax.bench import timing
from mint_jax.catalog.packed import Schema, digest_of, pack, unpack
from mint_jax.catalog.payloads import PayloadStore, Place
from mint_jax.digest import blake3_alone, blake3_of
from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, AdapterStack, Slot
from mint_jax.metrics import Progress
from mint_jax.models import hf, transformer
from mint_jax.models.config import Experts, ModelConfig
from mint_jax.residency.admission import Admission, verify
from mint_jax.residency.residency import Residency
from mint_jax.residency.slots import DeviceSlots
from mint_jax.rollout import generate as program
from mint_jax.rollout.sample import SamplingParams

BASE = "0" * 64  # fingerprint of the base that is only a shape here
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")


class _Store:
    """Packed objects in a payload store; counts what is read."""

    def __init__(self, folder: Path | str):
        self.payloads = PayloadStore(str(folder))
        self.places: dict[str, Place] = {}
        self.reads: list[str] = []

    def add(self, objects: Iterable[bytes]) -> list[str]:
        """Each in a pack of its own."""
        digests = []
        for data in objects:
            digests.append(digest_of(data))
            [self.places[digests[-1]]] = self.payloads.put([data])
        return digests

    def fetch(self, digest: str) -> np.ndarray:
        self.reads.append(digest)
        return self.payloads.read(self.places[digest])

    def nbytes(self, digests: Iterable[str]) -> int:
        return sum(self.places[digest].length for digest in digests)


def _residency(store: _Store, specs: Any, rooms: dict[int, int], config: Any, piece_bytes: int | None = None, **settings: Any) -> Residency:
    slots = DeviceSlots(specs, rooms, TARGETS, jnp.dtype(config.dtype), piece_bytes=piece_bytes)
    admission = Admission(BASE, specs, {bucket: slots.targets(bucket) for bucket in rooms}, finite=False)
    settings = {"workers": config.workers or os.cpu_count() or 1, "niceness": 0} | settings
    return Residency(store.fetch, unpack, admission, slots, 1 << 40, **settings)


def _load(residency: Residency, digests: list[str]) -> None:
    """Cold loads of revisions, done when their slots are written; then all is dropped again."""
    leases = residency.wait_for(digests)
    jax.block_until_ready(residency.stacks)
    for lease in leases:
        lease.release()


def _forget(residency: Residency, digests: Iterable[str]) -> None:
    for digest in digests:
        residency.drop(digest)


class _Files:
    """One adapter in all its forms on disk."""

    def __init__(self, config: Any, folder: Path):
        shape = config.shape
        heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
        experts = Experts(shape.experts, shape.per_token, shape.width)
        self.cfg = ModelConfig("qwen3_moe", 64, shape.d_model, shape.layers, **heads, d_ff=shape.width, qk_norm=True, experts=experts)
        self.specs = transformer.abstract(self.cfg)
        self.config = AdapterConfig(config.rank, 2.0 * config.rank, TARGETS)
        self.wanted = lora_tree.adapter_specs(self.specs, self.config)
        dtype = jnp.dtype(config.dtype)
        self._values = np.random.default_rng(config.seed).standard_normal(params_lib.count(self.wanted), np.float32).astype(dtype)
        self.store = _Store(folder / "payloads")
        schema = Schema(BASE, self.config, config.dtype)
        self.digests = self.store.add(pack(self.adapter(i), schema) for i in range(config.distinct))
        self.names = hf.module_names(self.cfg, lora_tree.projections(self.specs, TARGETS))
        peft.write_peft(folder / "unpacked", self.adapter(0), self.config, self.names)
        self.unpacked = folder / "unpacked" / peft.WEIGHTS
        self.middle = folder / "middle.safetensors"
        middle = {f"{path}/{i}": row for path, leaf in params_lib.leaves_with_path(self.adapter(0)) for i, row in enumerate(leaf)}
        save_file(middle, self.middle)
        self.tensors = {"unpacked": 2 * sum(map(len, self.names.values())), "middle": len(middle), "packed": len(self.paths())}

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
            stack = _at(self.wanted, path)
            flat[f"{path}/a"] = np.stack([tensors[f"base_model.model.{m}.lora_A.weight"] for m in modules]).reshape(stack["a"].shape)
            flat[f"{path}/b"] = np.stack([tensors[f"base_model.model.{m}.lora_B.weight"].T for m in modules]).reshape(stack["b"].shape)
        return params_lib.nest(flat)

    def per_tensor(self) -> Any:
        """PEFT's file, one device array a tensor, then stacked on the device."""
        arrays = jax.device_put(load_file(self.unpacked))
        flat = {}
        for path, modules in self.names.items():
            layers = _at(self.wanted, path)["a"].shape[0]
            each = len(modules) // layers  # experts, or one
            for factor, letter in (("a", "A"), ("b", "B")):
                names = [f"base_model.model.{module}.lora_{letter}.weight" for module in modules]
                rows = [_stack([arrays[name] for name in names[i * each : (i + 1) * each]], factor == "b") for i in range(layers)]
                flat[f"{path}/{factor}"] = _stack(rows, False).reshape(_at(self.wanted, path)[factor].shape)
        return params_lib.nest(flat)

    def read_middle(self) -> Any:
        """The file with one tensor per layer, projection and factor."""
        tensors = load_file(self.middle)
        layers = {path: spec.shape[0] for path, spec in params_lib.leaves_with_path(self.wanted)}
        return params_lib.nest({path: np.stack([tensors[f"{path}/{i}"] for i in range(n)]) for path, n in layers.items()})


def _at(tree: Any, path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree


@functools.partial(jax.jit, static_argnames="transpose")
def _stack(arrays: list[jax.Array], transpose: bool) -> jax.Array:
    """One array of equal ones, in one call; PEFT stores B the other way round."""
    stacked = jnp.stack(arrays)
    return stacked.swapaxes(-1, -2) if transpose else stacked


class _Plain:
    """A slot written without residency: read, put on the device, write."""

    def __init__(self, files: _Files, dtype: Any):
        self.files = files
        bucket = files.config.bucket
        specs = lora_tree.stack_specs(files.specs, TARGETS, bucket, 1)
        self.stack = AdapterStack(jax.tree.map(lambda s: jnp.zeros(s.shape, dtype), specs), jnp.zeros((1,), jnp.float32), bucket)
        self._write = jax.jit(lora_tree.write_slot, donate_argnums=0)

    def load(self, read: Callable[[], Any]) -> None:
        adapter = jax.device_put(read())  # what is on the device already stays as it is
        self.stack = jax.block_until_ready(self._write(self.stack, jnp.int32(0), adapter, jnp.float32(self.files.config.scale)))


def _loads(config: Any, files: _Files) -> dict[str, Any]:
    """One adapter by three ways, then many at once."""
    first, bucket = files.digests[0], files.config.bucket
    plain = _Plain(files, jnp.dtype(config.dtype))
    residency = _residency(files.store, files.specs, {bucket: config.distinct}, config)

    def cold(digests: list[str]) -> Callable[[], None]:
        def call() -> None:
            _load(residency, digests)

        return call

    forget = lambda: _forget(residency, files.digests)  # noqa: E731
    times: dict[str, list[float]] = {}
    work: dict[str, list[float]] = {}
    sides = {
        "per_tensor": lambda: plain.load(files.per_tensor),
        "stacked_on_host": lambda: plain.load(files.read_unpacked),
        "middle": lambda: plain.load(files.read_middle),
        "packed": cold([first]),
        "all": cold(files.digests),
    }
    progress = Progress("file to slot", config.n + 1)
    for k in range(config.n + 1):  # the first round compiles and warms
        for name, call in sides.items():
            forget()
            began, used = time.perf_counter(), time.process_time()
            call()
            times.setdefault(name, []).append(time.perf_counter() - began)
            work.setdefault(name, []).append(time.process_time() - used)
        progress.update(k + 1, " ".join(f"{name} {values[-1]:.3f} s" for name, values in times.items()))
    times, work = ({name: values[1:] for name, values in of.items()} for of in (times, work))
    same = _same(plain, residency, files)
    forget()
    files.store.reads.clear()
    futures = [residency.acquire(first, f"tenant {i}") for i in range(config.distinct)]
    _load(residency, [first])
    for future in futures:
        future.result().release()
    again = len(files.store.reads)
    residency.close()
    seconds = timing.medians(times)
    cpu = timing.medians(work)
    many = f"cold{config.distinct}_over_1"
    return {
        "ratio_packed": timing.ratio(times, "per_tensor", "packed"),
        "ratio_stacked_on_host": timing.ratio(times, "stacked_on_host", "packed"),
        "ratio_672": timing.ratio(times, "middle", "packed"),
        "load_ms": round(1e3 * seconds["packed"], 2),
        many: timing.ratio(times, "all", "packed"),
        f"{many}_floor": round(cpu["all"] / cpu["packed"] / (os.cpu_count() or 1), 3),
        f"{many}_cpu": timing.ratio(work, "all", "packed"),
        f"same{config.distinct}_loads": again,
        "cpu_ratio_packed": timing.ratio(work, "per_tensor", "packed"),
        "cpu_ratio_stacked_on_host": timing.ratio(work, "stacked_on_host", "packed"),
        "cpu_ratio_672": timing.ratio(work, "middle", "packed"),
        "cpu_seconds": {name: round(s, 4) for name, s in cpu.items()},
        "load_seconds": {name: [round(s, 4) for s in values] for name, values in times.items()},
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "same_values": same,
    }


def _same(plain: _Plain, residency: Residency, files: _Files) -> bool:
    """Whether the other ways and residency put the same into their slots."""
    [lease] = residency.wait_for([files.digests[0]])
    mine = lora_tree.read_slot(residency.stacks[lease.slot.bucket], lease.slot.index)
    same = []
    for read in (files.per_tensor, files.read_unpacked, files.read_middle):
        plain.load(read)
        found = lora_tree.read_slot(plain.stack, 0)
        same += jax.tree.leaves(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), mine, found))
    lease.release()
    return all(same)


def _parts(config: Any, files: _Files) -> dict[str, float]:
    """Milliseconds of the stages of one cold load, each alone."""
    digest, bucket = files.digests[0], files.config.bucket
    slots = DeviceSlots(files.specs, {bucket: 1}, TARGETS, jnp.dtype(config.dtype))
    admission = Admission(BASE, files.specs, {bucket: slots.targets(bucket)}, finite=False)
    foreign = Admission(BASE, files.specs, {bucket: slots.targets(bucket)})
    buffer = files.store.fetch(digest)
    adapter, schema = unpack(buffer)

    def stage():
        return slots.stage(Slot(bucket, 0), adapter, schema.config)

    def write(staged):
        slots.write(staged)
        jax.block_until_ready(slots.stacks)

    sides: dict[str, Callable[[], Any]] = {
        "fetch": lambda: files.store.fetch(digest),
        "touch": lambda: files.store.fetch(digest)[::4096].sum(),
        "verify_one_core": lambda: verify(digest, buffer, blake3_alone),
        "verify": lambda: verify(digest, buffer, blake3_of),
        "unpack": lambda: unpack(buffer),
        "admit": lambda: admission.check(digest, adapter, schema),
        "admit_foreign": lambda: foreign.check(digest, adapter, schema),
        "stage": stage,
        "stage_and_write": lambda: write(stage()),
    }
    seconds = timing.medians(timing.in_turn("parts", sides, config.n))
    return {name: round(1e3 * s, 2) for name, s in seconds.items()}


def _host_bytes(config: Any, files: _Files, folder: Path) -> dict[str, Any]:
    """Resident memory that a filled host cache takes, over the bytes it counts: large revisions, then many small ones."""
    small = config.small
    cfg = ModelConfig(
        "qwen3", 64, small.d_model, small.layers, num_heads=4, num_kv_heads=2, head_dim=small.d_model // 4, d_ff=2 * small.d_model
    )
    specs, adapter_config = transformer.abstract(cfg), AdapterConfig(1, 2.0, TARGETS)
    rng = np.random.default_rng(config.seed)
    wanted = lora_tree.adapter_specs(specs, adapter_config)
    little = _Store(folder / "little")
    schema = Schema(BASE, adapter_config, config.dtype)
    objects = [pack(jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), wanted), schema) for _ in range(small.count)]
    digests = [digest_of(data) for data in objects]
    little.places = dict(zip(digests, little.payloads.put(objects), strict=True))
    del objects
    out: dict[str, Any] = {}
    for name, store, shape, all_digests in (("", files.store, files.cfg, files.digests), ("_small", little, cfg, digests)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # a fresh process: no freed memory hides what is taken
            grown, counted = pool.apply(_fill_host, (config.to_dict(), store.payloads.url, store.places, shape, all_digests))
        out[f"host_bytes_ratio{name}"] = round(grown / counted, 4)
        out[f"host_bytes{name}"] = counted
    return out


def _fill_host(config: dict[str, Any], url: str, places: dict[str, Place], cfg: ModelConfig, digests: list[str]) -> tuple[int, int]:
    """Growth of resident memory, and bytes counted, while revisions fill the host cache behind a slot that is taken."""
    store = _Store(url)
    store.places = places
    residency = _residency(store, transformer.abstract(cfg), {1: 1}, ConfigDict(config), depth=len(digests))
    first, *others = digests
    residency.wait_for([first])  # its lease keeps the only slot: the others stay on the host
    before, counted = host.rss_bytes(), residency.host.nbytes
    for digest in others:
        residency.prefetch(digest)
    while residency.state()["loads"]["unfinished"]:
        time.sleep(0.01)
    grown, counted = host.rss_bytes() - before, residency.host.nbytes - counted
    residency.close()
    return grown, counted


class _Decoder:
    """A small model that decodes one token of every row at each call."""

    def __init__(self, pause: Any, seed: int):
        head_dim = 64
        heads = pause.d_model // head_dim
        self.cfg = ModelConfig(
            "qwen3",
            pause.vocab_size,
            pause.d_model,
            pause.layers,
            heads,
            heads,
            head_dim,
            4 * pause.d_model,
            tie_embeddings=True,
            qk_norm=True,
        )
        self.params = params_lib.init(transformer.abstract(self.cfg), jax.random.key(seed))
        rows, self.new = pause.rows, pause.window + 2
        self.prompts = np.random.default_rng(seed).integers(3, pause.vocab_size, (rows, 16)).astype(np.int32)
        self.lengths = np.full((rows,), 16, np.int32)
        zeros = np.zeros((rows,), np.float32)
        self.sampling = SamplingParams(zeros, np.zeros((rows,), np.int32), zeros + 1, zeros, np.zeros((rows,), np.uint32))  # type: ignore[arg-type]
        self.limits = program.Limits(np.full((rows,), self.new, np.int32), np.full((rows, 1), -1, np.int32))  # type: ignore[arg-type]
        self.mesh = mesh_lib.single_device_mesh()

    def steps(self, count: int, between: Callable[[], Any]) -> list[float]:
        """Seconds of each of ``count`` steps, ``between`` included."""
        out = []
        with jax.set_mesh(self.mesh):
            room = {"cfg": self.cfg, "rollouts": 1, "new_tokens": self.new}
            cache, state, _ = program.prefill(self.params, None, self.prompts, self.lengths, self.sampling, self.limits, **room)
            jax.block_until_ready(state)
            for _ in range(count):
                began = time.perf_counter()
                between()
                args = self.params, None, cache, self.lengths, state, self.sampling, self.limits, np.int32(1)
                state = jax.block_until_ready(program.decode(*args, cfg=self.cfg))
                out.append(time.perf_counter() - began)
        return out


def _pause(config: Any, files: _Files) -> dict[str, Any]:
    """Decode steps with and without cold loads behind them, in short windows that take turns."""
    pause, bucket = config.pause, files.config.bucket
    decoder = _Decoder(pause, config.seed)
    residency = _residency(files.store, files.specs, {bucket: 2}, config, pause.piece_bytes, workers=1, niceness=19)
    _load(residency, files.digests[:1])  # compiles
    decoder.steps(3, lambda: None)
    loading, stop, loaded = threading.Event(), threading.Event(), [0]

    def requests() -> None:
        """Asks for one cold revision after the other while ``loading`` is set."""
        k = 0
        while not stop.is_set():
            if not loading.wait(0.05):
                continue
            k += 1
            digest = files.digests[k % len(files.digests)]
            residency.drop(digest)
            try:
                residency.acquire(digest).result().release()
            except Exception:  # the bench is over
                return
            loaded[0] += 1

    client = threading.Thread(target=requests, daemon=True)
    client.start()
    times: dict[str, list[float]] = {"quiet": [], "loading": [], "again": []}
    progress = Progress("decode pause", pause.windows)
    for k in range(pause.windows):
        for name in times:
            if name == "loading":
                loading.set()
            times[name] += decoder.steps(pause.window, lambda: residency.commit_ready(budget_bytes=pause.piece_bytes))
            loading.clear()
            while residency.state()["loads"]["unfinished"]:  # not part of the quiet window that follows
                residency.commit_ready()
        progress.update(k + 1, f"{loaded[0]} cold loads")
    stop.set()
    residency.close()
    client.join(10)

    def ratio(name: str, q: float) -> float:
        return round(float(np.percentile(times[name], q) / np.percentile(times["quiet"], q)), 3)

    return {
        "decode_pause_p99": ratio("loading", 99),
        "decode_pause_p50": ratio("loading", 50),
        "decode_noise_p99": ratio("again", 99),
        "decode_noise_p50": ratio("again", 50),
        "decode_step_ms": {
            name: {f"p{q}": round(1e3 * float(np.percentile(values, q)), 2) for q in (50, 99)} for name, values in times.items()
        },
        "decode_steps": len(times["loading"]),
        "decode_loads": loaded[0],
    }


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
    fields = {
        "vocab_size": 256,
        "hidden_size": size.d_model,
        "intermediate_size": 3 * size.d_model,
        "num_hidden_layers": size.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": size.d_model // heads,
        "tie_word_embeddings": False,
    }
    cfg = ModelConfig("llama", 256, size.d_model, size.layers, heads, heads, size.d_model // heads, 3 * size.d_model, tie_embeddings=False)
    specs, adapter_config = transformer.abstract(cfg), AdapterConfig(size.rank, 2.0 * size.rank, TARGETS)
    rng = np.random.default_rng(config.seed)
    adapter = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), lora_tree.adapter_specs(specs, adapter_config))
    path = folder / "peft"
    peft.write_peft(path, adapter, adapter_config, hf.module_names(cfg, lora_tree.projections(specs, TARGETS)))
    store = _Store(folder / "dense")
    [digest] = store.add([pack(adapter, Schema(BASE, adapter_config, "float32"))])
    residency = _residency(store, specs, {adapter_config.bucket: 1}, config)
    torch.manual_seed(0)
    model = PeftModel.from_pretrained(transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)), path, adapter_name="first")

    def theirs() -> None:
        model.load_adapter(path, adapter_name="second")
        model.delete_adapter("second")

    def ours() -> None:
        residency.drop(digest)
        _load(residency, [digest])

    times = timing.in_turn("PEFT load_adapter", {"peft": theirs, "ours": ours}, config.n)
    residency.close()
    return {
        "ratio_peft_load_adapter": timing.ratio(times, "peft", "ours"),
        "peft_load_ms": {name: round(1e3 * s, 2) for name, s in timing.medians(times).items()},
        "peft_bytes": store.nbytes([digest]),
    }


def run(config: Any, workdir: Path, **_: Any) -> dict[str, Any]:
    """Runs the bench; returns its report. The files it makes are removed."""
    if config.n < 5:
        raise UserError(f"n is {config.n}; medians need at least 5")
    folder = workdir / "packed_load"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report: dict[str, Any] = {"bench": "packed_load", "device": timing.device(), "cores": os.cpu_count(), "n": config.n}
    try:
        files = _Files(config, folder)
        report |= {
            "shape": config.shape.to_dict(),
            "tensors": files.tensors,
            "file_bytes": {
                "unpacked": files.unpacked.stat().st_size,
                "middle": files.middle.stat().st_size,
                "packed": files.store.nbytes(files.digests[:1]),
            },
        }
        report |= _loads(config, files)
        report["parts_ms"] = _parts(config, files)
        report |= _host_bytes(config, files, folder)
        report |= _pause(config, files)
        report |= _against_peft(config, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report
