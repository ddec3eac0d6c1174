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

from benchmarks import timing, train_wave
from benchmarks.decode_steps import Steps, adapter_bytes, random_stack
from mint_jax import params as params_lib
from mint_jax.lora.tree import AdapterConfig, Slot, Stacks
from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.models import names, transformer
from mint_jax.models.paged import PAGE
from mint_jax.rollout import device
from mint_jax.rollout.device import STEPS
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request
from mint_jax.train.config import LossConfig, PolicyConfig
from mint_jax.train.trainer import Trainer

Row = dict[str, Any]


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its rows."""
    file, rows = workdir / "gpu.jsonl", []
    file.unlink(missing_ok=True)
    deadline = time.monotonic() + config.seconds
    bench = _Bench(config, file, deadline)
    # The peers' process needs the memory that this one holds from the first part of its own on.
    for name in sorted(config.parts, key=lambda name: name != "peers"):
        (least, most), began = config.limits[name], time.monotonic()

        def note(row: Row, name: str = name) -> None:
            rows.append(_reported(file, {"part": name} | row))

        if (left := deadline - began) < least:
            note({"skipped": f"{left:.0f} s left"})
            continue
        try:
            for row in getattr(bench, name)():
                note({"s": _since(began)} | row)
                if time.monotonic() > min(began + most, deadline):
                    note({"stopped": f"after {_since(began)} s"})
                    break
        except Exception as error:  # a part that fails leaves the others their time
            traceback.print_exc()
            note({"failed": repr(error)[:500]})
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
    first, *more = (timing.seconds_of(lambda: jax.block_until_ready(call())) for _ in range(n + 1))
    return round(first, 2), more


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

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(3, self.base.cfg.vocab_size, count).tolist())

    def _share(self, seconds: float, nbytes: float = 0, flops: float = 0) -> float | None:
        """Share of the floor of bytes or operations; None before ``floors`` ran."""
        if not self.rate:
            return None
        return round(max(nbytes / self.bandwidth, flops / self.rate) / seconds, 4)

    def floors(self) -> Iterator[Row]:
        """Bytes read a second; operations a second of a chain of one layer's products."""
        part, n = self.config.floors, self.config.n

        @jax.jit
        def read(words: jax.Array) -> jax.Array:
            def body(i: jax.Array, total: jax.Array) -> jax.Array:
                return total + jnp.sum(words ^ i.astype(jnp.uint32))

            return jax.lax.fori_loop(0, part.loops, body, jnp.uint32(0))

        words = jax.random.bits(jax.random.key(0), (part.read_bytes // 4,), jnp.uint32)
        first, times = _timed(functools.partial(read, words), n)
        self.bandwidth = part.loops * words.nbytes / float(np.median(times))
        del words
        yield {"name": "read", "first_s": first, "gb_per_s": round(self.bandwidth / 1e9, 1)}

        layer = self.base.params["dense"]
        chain = [layer["attn"][name]["w"][0] for name in "qo"]
        chain += [layer["mlp"][name]["w"][0] for name in ("up", "down")]
        shape = part.rows, chain[0].shape[0]
        x = jax.random.normal(jax.random.key(1), shape).astype(self.base.dtype)

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
        rows, tokens = part.rows // policies, part.rows * part.tokens
        groups = {
            policy.name: [train_wave.group(self._tokens(part.tokens)) for _ in range(rows)]
            for policy in named
        }
        first, times = _timed(train_wave.step(trainer, groups), self.config.n)
        seconds, flops = float(np.median(times)), 4 * self.weights * tokens
        stats = jax.local_devices()[0].memory_stats() or {}
        yield {
            "name": f"{policies} x {rows} x {part.tokens}" + f", {most} tokens a pass" * (most > 0),
            "first_s": first,
            "step_s": timing.median(times),
            "tokens_per_s": round(tokens / seconds),
            "tflop_per_s": round(flops / seconds / 1e12, 1),
            "share_of_matmul": self._share(seconds, flops=flops),
            "peak_bytes_so_far": stats.get("peak_bytes_in_use"),
        }

    def decode(self) -> Iterator[Row]:
        """A step of decoding through the engine, from the difference of two lengths; prompts are in
        the cache.
        """
        part = self.config.decode
        sizes = {"rows": part.rows, "max_rows": max(part.rows), "cache_bytes": part.cache_bytes}
        self.engine = engine = Engine(self.base, **sizes)
        lengths = {"short": STEPS, "long": STEPS + part.tokens}
        positions = part.context + sum(lengths.values()) / 2
        for rows in sorted(part.rows, reverse=True):
            prompts = [self._tokens(part.context + 1) for _ in range(rows)]

            def sample(tokens: int, prompts: list[Any] = prompts) -> None:
                engine.generate([Request(p, max_tokens=tokens, temperature=0.0) for p in prompts])

            sides = {name: functools.partial(sample, count) for name, count in lengths.items()}
            first, _ = _timed(sides["long"], 0)
            times = timing.in_turn(f"{rows} rows", sides, self.config.n)
            steps = [(b - a) / part.tokens for a, b in zip(times["short"], times["long"])]
            nbytes = self.base.nbytes + rows * positions * self._position_bytes()
            yield {
                "name": f"{rows} rows",
                "first_s": first,
                "step_ms": timing.median(steps, 1e3),
                "positions": positions,
                "share_of_bytes": self._share(float(np.median(steps)), nbytes),
            }

    def _position_bytes(self) -> float:
        """Bytes of one token's keys and values in all layers."""
        return device.page_bytes(self.base.cfg, self.base.dtype, False) / PAGE

    def prefill(self) -> Iterator[Row]:
        """One prompt that is not in the cache, and its first token."""
        count, room = self.config.prefill.tokens, self.config.decode.cache_bytes
        engine = self.engine or Engine(self.base, rows=(1,), max_rows=1, cache_bytes=room)

        def read() -> None:
            engine.generate([Request(self._tokens(count), max_tokens=1, temperature=0.0)])

        first, times = _timed(read, self.config.n)
        seconds = float(np.median(times))
        products = self.weights - transformer.stored_unembed(self.base.params).size
        yield {
            "name": f"{count} tokens",
            "first_s": first,
            "to_first_token_s": timing.median(times),
            "tokens_per_s": round(count / seconds),
            "share_of_matmul": self._share(seconds, flops=2 * products * count),
        }
        self.engine = None  # its cache is room for what follows

    def adapters(self) -> Iterator[Row]:
        """Steps of decoding without the engine: the bare base, and several distinct adapters in the
        base's dtype, as a revision in 16 bits has them; the most of them in float32 too.
        """
        part = self.config.decode
        rows, adapter = max(part.rows), AdapterConfig(part.rank, 2.0 * part.rank)
        steps = Steps(self.base, rows, part.context + STEPS, self.config.seed)
        most = max(count for count in part.adapters if count <= rows)
        exact = {adapter.bucket: random_stack(self.base, adapter, most, self.config.seed)}
        stacks = jax.tree.map(lambda x: x.astype(self.base.dtype) if x.ndim > 1 else x, exact)
        each = adapter_bytes(self.base, adapter) * jnp.dtype(self.base.dtype).itemsize // 4
        base_bytes = self.base.nbytes
        base_bytes += rows * (part.context + STEPS // 2) * self._position_bytes()
        sides: dict[str, Callable[[], Any]] = {}
        nbytes: dict[str, float] = {}

        def add(name: str, count: int, stacks: Stacks, factor: int = 1) -> None:
            slots = [Slot(adapter.bucket, r % count) if count else None for r in range(rows)]
            plan = jax.device_put(steps.plan(slots, stacks, part.context))
            sides[name] = lambda: steps.take(stacks, plan, STEPS)
            nbytes[name] = base_bytes + factor * count * each

        add("bare", 0, {})
        for count in filter(lambda count: count <= rows, part.adapters):
            add(str(count), count, stacks)
        add(f"{most} float32", most, exact, 2)
        times = timing.in_turn("adapters", sides, self.config.n)
        for name, seconds in times.items():
            yield {
                "name": f"{name} on {rows} rows",
                "step_ms": timing.median(seconds, 1e3 / STEPS),
                "share_of_bytes": self._share(float(np.median(seconds)) / STEPS, nbytes[name]),
                "over_bare": timing.ratio(times, name, "bare", less=1),
                "bytes_over_bare": round(nbytes[name] / base_bytes - 1, 4),
            }

    def handoff(self) -> Iterator[Row]:
        """An optimizer step, and the first token of exactly these weights: the sampler reads the
        trainer's slot. AdamW runs in full, on gradient sums of zero.
        """
        part = self.config.handoff
        policy = PolicyConfig("p", AdapterConfig(part.rank, 2.0 * part.rank))
        trainer = Trainer(self.base, [policy])
        engine = Engine(self.base, rows=(1,), max_rows=1, cache_bytes=part.cache_bytes)
        prompt = self._tokens(part.prompt)

        def hand_over() -> None:
            trainer.optim_step(["p"])
            request = Request(prompt, trainer.slots["p"], max_tokens=1, temperature=0.0)
            engine.generate([request], trainer.stacks)

        first, times = _timed(hand_over, part.n)
        percentiles = {f"p{q}_ms": timing.percentile(times, q, 1e3) for q in (50, 95)}
        yield {"name": f"rank {part.rank}", "first_s": first} | percentiles

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
    is_gpu = torch.cuda.is_available()

    def tokens(*shape: int) -> Any:
        return torch.randint(3, fields["vocab_size"], shape)

    def times(call: Callable[[], Any]) -> list[float]:
        def synced() -> None:
            call()
            if is_gpu:
                torch.cuda.synchronize()

        return timing.in_turn("peers", {"": synced}, 3, warm=0)[""]

    torch.manual_seed(0)
    torch.set_default_device("cuda" if is_gpu else "cpu")
    how = {"dtype": getattr(torch, config["dtype"]), "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**fields), **how).eval()

    def decoding(rows: int) -> Row:
        """Keys and values are not repeated for every query head, as by default if there is a
        mask.
        """
        sdpa_attention.use_gqa_in_sdpa = lambda *args, **more: True
        room = decode["context"] + 4 * STEPS
        cache = StaticCache(config=model.config, max_cache_len=room)
        prompt = tokens(rows, decode["context"])
        at = prompt[:, -1:].clone()
        places = torch.full((rows, 1), decode["context"])
        cached = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        model(prompt, **cached)

        def one() -> None:
            out = model(at, position_ids=places, **cached)
            at.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

        step: Callable[[], Any] = one
        if is_gpu:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                one()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one()
            step = graph.replay
        step()
        seconds = times(lambda: [step() for _ in range(STEPS)])
        name = f"transformers, {rows} rows" + ", CUDA graph" * is_gpu + ", grouped queries"
        return {"name": name, "step_ms": timing.median(seconds, 1e3 / STEPS)}

    def training(rows: int) -> Row:
        """A step of one policy; every pass has ``peers.rows`` rows at most."""
        how = {"target_modules": "all-linear", "r": train["rank"], "lora_alpha": 2 * train["rank"]}
        peer: Any = get_peft_model(model, LoraConfig(**how), autocast_adapter_dtype=False)
        peer.train()
        passes = max(1, rows // config["peers"]["rows"])
        batches = tokens(passes, rows // passes, train["tokens"])
        own = [p for p in peer.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(own, lr=1e-4, foreach=True)

        def step() -> None:
            for batch in batches:
                (peer(batch, labels=batch, use_cache=False).loss / passes).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        seconds = times(step)
        peer.unload()
        return {
            "name": f"PEFT, 1 x {rows} x {train['tokens']}, {passes} passes each",
            "step_s": timing.median(seconds),
            "tokens_per_s": round(rows * train["tokens"] / float(np.median(seconds))),
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
