"""One GPU against its own limits: training, decoding, prefill and handoff, in one command.

Every measurement is a row, printed and appended to ``WORKDIR/gpu.jsonl``. ``config.limits`` has two
numbers of seconds for each part: it is skipped where less than the first is left, and measures no
further row after the second. Shares compare with ``floors`` of the same card: reading memory, and
products of the model's shapes. ``first_s`` is a first call with its compilation; ``peers`` runs
transformers and PEFT on random weights of the same shape.
"""

import functools
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.decode_steps import Steps, adapter_bytes, random_stack
from mint_jax import params as params_lib
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import names, transformer
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device
from mint_jax.rollout.device import STEPS
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.batch import Group, TrainSequence
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.trainer import Trainer

Row = dict[str, Any]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its rows."""
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "gpu.jsonl"
    file.unlink(missing_ok=True)
    deadline = time.monotonic() + config.seconds
    bench, rows = _Bench(config, file, deadline), []
    # The peers' process needs the memory that this one holds from the first part of its own on.
    for name in sorted(config.parts, key=lambda name: name != "peers"):
        (least, most), began = config.limits[name], time.monotonic()
        if (left := deadline - began) < least:
            rows.append(_reported(file, {"part": name, "skipped": f"{left:.0f} s left"}))
            continue
        try:
            for row in getattr(bench, name)():
                rows.append(_reported(file, {"part": name, "s": _since(began)} | row))
                if time.monotonic() > min(began + most, deadline):
                    stopped = {"part": name, "stopped": f"after {_since(began)} s"}
                    rows.append(_reported(file, stopped))
                    break
        except Exception as error:  # a part that fails leaves the others their time
            traceback.print_exc()
            rows.append(_reported(file, {"part": name, "failed": repr(error)[:500]}))
    return {"base": config.base, "rows": rows}


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def _reported(file: Path, row: Row) -> Row:
    """Appends a row to the file and prints it."""
    line = json.dumps(row)
    with file.open("a") as out:
        out.write(line + "\n")
    print(line, file=sys.stderr, flush=True)
    return row


def _timed(call: Callable[[], Any], n: int) -> tuple[float, list[float]]:
    """Seconds of a first call, and of ``n`` more."""
    seconds = []
    for _ in range(n + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return round(seconds[0], 2), seconds[1:]


class _Bench:
    """The parts, which yield rows. ``bandwidth`` and ``rate`` are bytes and operations a second."""

    def __init__(self, config: Any, file: Path, deadline: float):
        self.config, self.file, self.deadline = config, file, deadline
        self.rng = np.random.default_rng(config.seed)
        self.bandwidth = self.rate = 0.0
        self.engine: Engine | None = None

    @functools.cached_property
    def base(self) -> base_lib.Base:
        began = time.monotonic()
        base = base_lib.load(self.config.base, single_device_mesh(), self.config.dtype)
        jax.block_until_ready(base.params)
        _reported(self.file, {"part": "base", "s": _since(began), "bytes": base.nbytes})
        return base

    @functools.cached_property
    def weights(self) -> int:
        return params_lib.count(transformer.abstract(self.base.cfg))

    def _tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.base.cfg.vocab_size, count).tolist()

    def _share(self, floor_s: float, seconds: float) -> float | None:
        """Share of a floor; None before ``floors`` ran."""
        return round(floor_s / seconds, 4) if self.rate else None

    def _floor(self, nbytes: float = 0, flops: float = 0) -> float:
        return max(nbytes / self.bandwidth, flops / self.rate) if self.rate else 0.0

    # -- floors

    def floors(self) -> Iterator[Row]:
        """Bytes read a second; operations a second of a chain of one layer's products."""
        part, n = self.config.floors, self.config.n
        count = part.read_bytes // 4

        @jax.jit
        def read(words: jax.Array) -> jax.Array:
            def body(i: jax.Array, total: jax.Array) -> jax.Array:
                return total + jnp.sum(words ^ i.astype(jnp.uint32))

            return jax.lax.fori_loop(0, part.loops, body, jnp.uint32(0))

        words = jax.random.bits(jax.random.key(0), (count,), jnp.uint32)
        first, times = _timed(functools.partial(read, words), n)
        self.bandwidth = part.loops * 4 * count / float(np.median(times))
        del words
        yield {"name": "read", "first_s": first, "gb_per_s": round(self.bandwidth / 1e9, 1)}

        layer = self.base.params["dense"]
        chain = [layer["attn"][name]["w"][0] for name in "qo"]
        chain += [layer["mlp"][name]["w"][0] for name in ("up", "down")]
        x = jax.random.normal(jax.random.key(1), (part.rows, chain[0].shape[0])).astype(
            self.base.dtype
        )

        @jax.jit
        def multiply(x: jax.Array, chain: list[jax.Array]) -> jax.Array:
            def body(_: jax.Array, x: jax.Array) -> jax.Array:
                for w in chain:
                    x = jnp.dot(x, w, preferred_element_type=x.dtype)
                return x

            return jax.lax.fori_loop(0, part.loops, body, x)

        first, times = _timed(functools.partial(multiply, x, chain), n)
        flops = part.loops * 2 * part.rows * sum(w.size for w in chain)
        self.rate = flops / float(np.median(times))
        yield {"name": "matmul", "first_s": first, "tflop_per_s": round(self.rate / 1e12, 1)}

    # -- training

    def train_passes(self) -> Iterator[Row]:
        """One policy in passes of fewer rows, of which fewer activations are kept."""
        return self._train(1, self.config.train.pass_tokens)

    def train_8(self) -> Iterator[Row]:
        """The same rows, shared by 8 policies."""
        return self._train(8)

    def _train(self, policies: int, most: int = 0) -> Iterator[Row]:
        part = self.config.train
        adapter, loss = AdapterConfig(part.rank, 2.0 * part.rank), LossConfig("cross_entropy")
        named = [PolicyConfig(f"p{i}", adapter, loss=loss, seed=i) for i in range(policies)]
        trainer = Trainer(self.base, named, max_tokens=most or part.rows * part.tokens)
        groups = {
            policy.name: [self._row_of_tokens(part.tokens) for _ in range(part.rows // policies)]
            for policy in named
        }

        def step() -> Any:
            trainer.update(groups)
            return trainer.state

        first, times = _timed(step, self.config.n)
        seconds, tokens = float(np.median(times)), part.rows * part.tokens
        stats = jax.local_devices()[0].memory_stats() or {}
        yield {
            "name": f"{policies} x {part.rows // policies} x {part.tokens}"
            + f", {most} tokens a pass" * (most > 0),
            "first_s": first,
            "step_s": timing.median(times),
            "tokens_per_s": round(tokens / seconds),
            "tflop_per_s": round(4 * self.weights * tokens / seconds / 1e12, 1),
            "share_of_matmul": self._share(self._floor(flops=4 * self.weights * tokens), seconds),
            "peak_bytes_so_far": stats.get("peak_bytes_in_use"),
        }

    def _row_of_tokens(self, count: int) -> Group:
        tokens = self._tokens(count)
        after = tokens[1:]
        return Group(tokens[:1], [TrainSequence(after, [1 / len(after)] * len(after))])

    # -- sampling

    def decode(self) -> Iterator[Row]:
        """A step of decoding through the engine, from the difference of two lengths; prompts are in
        the cache.
        """
        part = self.config.decode
        sizes = {"rows": part.rows, "max_rows": max(part.rows), "cache_bytes": part.cache_bytes}
        self.engine = engine = Engine(self.base, **sizes)
        short, long = STEPS, STEPS + part.tokens
        for rows in sorted(part.rows, reverse=True):
            prompts = [tuple(self._tokens(part.context + 1)) for _ in range(rows)]

            def sample(tokens: int, prompts: list[Any] = prompts) -> None:
                engine.generate([Request(p, max_tokens=tokens, temperature=0.0) for p in prompts])

            first, _ = _timed(lambda: sample(long), 0)
            sides = {"short": lambda: sample(short), "long": lambda: sample(long)}
            times = timing.in_turn(f"{rows} rows", sides, self.config.n)
            steps = [(b - a) / part.tokens for a, b in zip(times["short"], times["long"])]
            positions = part.context + (short + long) / 2
            nbytes = self.base.nbytes + rows * positions * self._position_bytes()
            yield {
                "name": f"{rows} rows",
                "first_s": first,
                "step_ms": timing.median(steps, 1e3),
                "positions": positions,
                "floor_ms": round(1e3 * self._floor(nbytes), 3),
                "share_of_bytes": self._share(self._floor(nbytes), float(np.median(steps))),
            }

    def _position_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return device.page_bytes(self.base.cfg, self.base.dtype, False) / PAGE

    def prefill(self) -> Iterator[Row]:
        """One prompt that is not in the cache, and its first token."""
        count = self.config.prefill.tokens
        room = self.config.decode.cache_bytes
        engine = self.engine or Engine(self.base, rows=(1,), max_rows=1, cache_bytes=room)

        def read() -> None:
            engine.generate([Request(tuple(self._tokens(count)), max_tokens=1, temperature=0.0)])

        first, times = _timed(read, self.config.n)
        seconds = float(np.median(times))
        table = transformer.stored_unembed(self.base.params).size
        floor = self._floor(flops=2 * (self.weights - table) * count)
        yield {
            "name": f"{count} tokens",
            "first_s": first,
            "to_first_token_s": timing.median(times),
            "tokens_per_s": round(count / seconds),
            "share_of_matmul": self._share(floor, seconds),
        }
        self.engine = None  # its cache is room for what follows

    def adapters(self) -> Iterator[Row]:
        """Steps of decoding without the engine: the bare base, and several distinct adapters in the
        base's dtype, as a revision in 16 bits has them; the most of them in float32 too.
        """
        part = self.config.decode
        rows, adapter = max(part.rows), AdapterConfig(part.rank, 2.0 * part.rank)
        positions = part.context + STEPS // 2
        steps = Steps(self.base, rows, part.context + STEPS, self.config.seed)
        counts = [count for count in part.adapters if count <= rows]
        exact = {adapter.bucket: random_stack(self.base, adapter, max(counts), self.config.seed)}
        stacks = jax.tree.map(lambda x: x.astype(self.base.dtype) if x.ndim > 1 else x, exact)
        each = adapter_bytes(self.base, adapter) * jnp.dtype(self.base.dtype).itemsize // 4
        bare = jax.device_put(steps.plan([None] * rows, {}, part.context))
        sides: dict[str, Callable[[], Any]] = {"bare": lambda: steps.take({}, bare, STEPS)}
        for count in counts:
            slots: list[Slot | None] = [Slot(adapter.bucket, r % count) for r in range(rows)]
            plan = jax.device_put(steps.plan(slots, stacks, part.context))
            sides[str(count)] = lambda plan=plan: steps.take(stacks, plan, STEPS)
            if count == max(counts):
                sides[f"{count} float32"] = lambda plan=plan: steps.take(exact, plan, STEPS)
        times = timing.in_turn("adapters", sides, self.config.n)
        base_bytes = self.base.nbytes + rows * positions * self._position_bytes()
        for name, seconds in times.items():
            count, _, dtype = name.partition(" ")
            nbytes = base_bytes + (0 if name == "bare" else int(count) * each * (1 + bool(dtype)))
            step = float(np.median(seconds)) / STEPS
            yield {
                "name": f"{name} on {rows} rows",
                "step_ms": timing.median(seconds, 1e3 / STEPS),
                "share_of_bytes": self._share(self._floor(nbytes), step),
                "over_bare": timing.ratio(times, name, "bare", less=1),
                "bytes_over_bare": round(nbytes / base_bytes - 1, 4),
            }

    def handoff(self) -> Iterator[Row]:
        """An optimizer step, and the first token of exactly these weights: the sampler reads the
        trainer's slot. AdamW runs in full, on gradient sums of zero.
        """
        part = self.config.handoff
        policy = PolicyConfig("p", AdapterConfig(part.rank, 2.0 * part.rank))
        trainer = Trainer(self.base, [policy])
        engine = Engine(self.base, rows=(1,), max_rows=1, cache_bytes=part.cache_bytes)
        prompt = tuple(self._tokens(part.prompt))

        def hand_over() -> None:
            trainer.optim_step(["p"])
            request = Request(prompt, trainer.slots["p"], max_tokens=1, temperature=0.0)
            engine.generate([request], trainer.stacks)

        first, times = _timed(hand_over, part.n)
        yield {
            "name": f"rank {part.rank}",
            "first_s": first,
            "p50_ms": timing.percentile(times, 50, 1e3),
            "p95_ms": timing.percentile(times, 95, 1e3),
        }

    # -- peers

    def peers(self) -> Iterator[Row]:
        """See ``_peers``; the process ends at the deadline at the latest."""
        if not self.config.peers.base:
            yield {"skipped": "config.peers.base names no base"}
            return
        child = multiprocessing.get_context("spawn").Process(
            target=_peers, args=(self.config.to_json_best_effort(), str(self.file))
        )
        child.start()
        child.join(max(1.0, self.deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            yield {"stopped": "at the deadline"}
        else:
            yield {"exit": child.exitcode}


def _peers(config_json: str, file: str) -> None:
    """PEFT's step of one policy and transformers' steps of decoding, appended to the file.

    Adapters are in the base's dtype, nothing is computed twice. On a GPU a step of decoding is one
    CUDA graph over a cache of fixed size.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config, StaticCache
    from transformers.integrations import sdpa_attention

    config = json.loads(config_json)
    fields = names.shape(config["peers"]["base"])
    train, decode = config["train"], config["decode"]
    where = "cuda" if torch.cuda.is_available() else "cpu"

    def synchronise() -> None:
        if where == "cuda":
            torch.cuda.synchronize()

    def seconds(call: Callable[[], Any], n: int) -> list[float]:
        out = []
        for _ in range(n):
            synchronise()
            began = time.perf_counter()
            call()
            synchronise()
            out.append(time.perf_counter() - began)
        return out

    torch.manual_seed(0)
    how = {"dtype": getattr(torch, config["dtype"]), "attn_implementation": "sdpa"}
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**fields), **how)
    model.eval()

    def decoding(rows: int) -> Row:
        """Keys and values are not repeated for every query head, as by default if there is a
        mask.
        """
        sdpa_attention.use_gqa_in_sdpa = lambda *args, **more: True
        room = decode["context"] + 4 * STEPS
        cache = StaticCache(config=model.config, max_cache_len=room)
        shape = (rows, decode["context"])
        prompt = torch.randint(3, fields["vocab_size"], shape, device=where)
        at = prompt[:, -1:].clone()
        places = torch.full((rows, 1), decode["context"], device=where)
        cached = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        model(prompt, **cached)

        def one() -> None:
            out = model(at, position_ids=places, **cached)
            at.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

        step: Callable[[], Any] = one
        if where == "cuda":
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                one()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one()
            step = graph.replay
        step()
        times = seconds(lambda: [step() for _ in range(STEPS)], 3)
        name = f"transformers, {rows} rows" + ", CUDA graph" * (where == "cuda")
        name += ", grouped queries"
        return {"name": name, "step_ms": timing.median(times, 1e3 / STEPS)}

    def training(rows: int) -> Row:
        """A step of one policy; every pass has ``peers.rows`` rows at most."""
        lora = LoraConfig(
            target_modules="all-linear", r=train["rank"], lora_alpha=2 * train["rank"]
        )
        peer: Any = get_peft_model(model, lora, autocast_adapter_dtype=False)
        peer.train()
        passes = max(1, rows // config["peers"]["rows"])
        shape = (passes, rows // passes, train["tokens"])
        batches = torch.randint(3, fields["vocab_size"], shape, device=where)
        own = [p for p in peer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-4, foreach=True)

        def step() -> None:
            for tokens in batches:
                (peer(tokens, labels=tokens, use_cache=False).loss / passes).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        times = seconds(step, 3)
        peer.unload()
        return {
            "name": f"PEFT, 1 x {rows} x {train['tokens']}, {passes} passes each",
            "step_s": timing.median(times),
            "tokens_per_s": round(rows * train["tokens"] / float(np.median(times))),
        }

    todo = [(training, train["rows"])]
    todo += [(decoding, rows) for rows in sorted(decode["rows"], reverse=True)]
    for measure, count in todo:
        try:
            with torch.set_grad_enabled(measure is training):
                row = measure(count)
        except Exception as error:  # the others may run
            traceback.print_exc()
            row = {"failed": repr(error)[:500]}
        _reported(Path(file), {"part": "peers"} | row)
