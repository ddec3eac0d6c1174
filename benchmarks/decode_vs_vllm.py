"""Decoding rows of many adapters in one batch, against vLLM on the same CPU.

Both sides have the same checkpoint, adapters and cached prompts. ``ratio_R``: our tokens a second
with R rows over vLLM's in float32, our arithmetic; ``ratio_R_bfloat16``: over vLLM in bfloat16,
whose weights have half the bytes. ``same_tokens_R``: share of equal greedy tokens in float32.
"""

import contextlib
import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import timing, vllm_peer
from benchmarks.alone import scratch
from benchmarks.bases import open_base
from benchmarks.decode_steps import random_stack
from mint_jax.errors import UserError
from mint_jax.lora import peft
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig, Slot
from mint_jax.models import transformer
from mint_jax.models.base import Base
from mint_jax.models.outline import peft_tables
from mint_jax.rollout.engine import Engine
from mint_jax.rollout.request import Request


class Elsewhere:
    """A peer in an interpreter of its own environment: ``program`` answers lines of JSON with lines
    of JSON, after a first one with its ``version``; ``log`` gets its stderr.
    """

    def __init__(self, python: str, program: str, argument: str, log: Path):
        self._log = log
        with log.open("w") as out:
            # -I: not our packages, which its environment lacks
            command = [python, "-I", program, argument]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(60)
            words = self._log.read_text().strip().splitlines()
            raise RuntimeError(
                f"the peer ended with status {self._process.returncode}:"
                f" {words[-1] if words else 'no word'}; see {self._log}"
            )
        return json.loads(line)

    def ask(self, question: Any) -> Any:
        """Its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; where no interpreter is named ours alone, with ``"vllm": None``."""
    if config.python and not Path(config.python).is_file():
        raise UserError(
            f"python is {config.python!r}, which is not there: name the interpreter of an"
            " environment that has vLLM"
        )
    base = open_base(config)
    report: dict[str, Any] = {"base": base.name, "weights": base.weights, "vllm": None}
    report["adapters"] = config.adapters
    with contextlib.ExitStack() as opened:
        peers: dict[str, Elsewhere] = {}
        for dtype in config.dtypes if config.python else ():
            settings, log = json.dumps(_settings(config, base, dtype)), f"vllm_{dtype}.log"
            peer = Elsewhere(config.python, vllm_peer.__file__, settings, workdir / log)
            peers[dtype] = opened.enter_context(contextlib.closing(peer))
            report["vllm"] = peer.version
        folder = opened.enter_context(scratch(workdir / "adapters"))
        return report | _compare(config, base, peers, folder)


def _settings(config: Any, base: Base, dtype: str) -> dict[str, Any]:
    return {
        "directory": str(base.directory),
        "dtype": dtype,
        "context": config.context + config.tokens + 1,
        "rows": max(config.rows),
        "adapters": config.adapters,
        "rank": max(8, AdapterConfig(config.rank).bucket),  # which vLLM has room for
        "compile": config.compile,
        "cache_gb": config.cache_gb,
    }


def _compare(config: Any, base: Base, peers: dict[str, Elsewhere], folder: Path) -> dict[str, Any]:
    adapter = AdapterConfig(config.rank, 2.0 * config.rank)
    stack = random_stack(base, adapter, config.adapters, config.seed)
    paths = _written(base, adapter, stack, folder)
    rng = np.random.default_rng(config.seed)
    out: dict[str, Any] = {}
    for rows in config.rows:
        shape = rows, config.context + 1
        prompts = rng.integers(3, base.cfg.vocab_size, shape).tolist()
        engine = Engine(base, max_rows=rows, rows=(rows,))
        how = {"max_tokens": config.tokens, "temperature": 0.0, "stop_ids": ()}
        requests, theirs = [], []
        for i, prompt in enumerate(prompts):
            k = i % (config.adapters + 1)  # the last is the base
            # the version is whose prompts stay in the cache
            named = (
                {"adapter": Slot(adapter.bucket, k), "version": k} if k < config.adapters else {}
            )
            requests.append(Request(tuple(prompt), **named, **how))
            theirs.append((k + 1, str(paths[k])) if named else (0, ""))
        question = {"prompts": prompts, "adapters": theirs, "tokens": config.tokens}

        def ours(engine: Engine = engine, requests: list[Request] = requests) -> list[list[int]]:
            return [c.tokens for [c] in engine.generate(requests, {adapter.bucket: stack})]

        last: dict[str, Any] = {}

        def side(name: str, call: Callable[[], Any], last: dict[str, Any] = last) -> None:
            last[name] = call()

        asks = {dtype: functools.partial(peer.ask, question) for dtype, peer in peers.items()}
        sides = {
            name: functools.partial(side, name, call)
            for name, call in {"ours": ours, **asks}.items()
        }
        ours()
        read = engine.counts["prefilled_tokens"]
        times = timing.in_turn(f"decoding {rows} rows", sides, config.n, warm=2)
        if engine.counts["prefilled_tokens"] != read:
            raise RuntimeError("prompts were to stay in the cache, and were read again")
        out[f"seconds_{rows}"] = timing.medians_of(times)
        for dtype in peers:
            name = f"ratio_{rows}" if dtype == "float32" else f"ratio_{rows}_{dtype}"
            out[name] = timing.ratio(times, dtype, "ours")
        if "float32" in last:
            same = np.array(last["ours"]) == np.array(last["float32"])
            out[f"same_tokens_{rows}"] = round(float(same.mean()), 3)
    return out


def _written(
    base: Base, adapter: AdapterConfig, stack: lora_tree.AdapterStack, folder: Path
) -> list[Path]:
    """The adapters of a stack as directories of PEFT's."""
    specs = lora_tree.adapter_specs(transformer.abstract(base.cfg), adapter)
    paths = [folder / f"adapter-{k}" for k in range(stack.slots)]
    for k, path in enumerate(paths):
        tree = jax.device_get(lora_tree.read_slot(stack, k, adapter.rank, specs))
        peft.write_peft(path, tree, adapter, peft_tables(base.cfg)[0])
    return paths
