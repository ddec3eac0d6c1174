"""Greedy sampling and LoRA training by torch, transformers and PEFT on the same checkpoint.

A peer runs with the options that are fastest here, tried on the work itself: threads, attention,
cache, then ``torch.compile`` in a process with a time limit.
"""

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import timing

ATTENTION = ("sdpa", "eager")
THREADS = tuple(dict.fromkeys((os.cpu_count() or 1, 1)))
CACHES = ("dynamic", "static")


class Options(NamedTuple):
    """Options of a peer; see ``ATTENTION`` and ``CACHES``."""

    attention: str = ATTENTION[0]
    threads: int = THREADS[0]
    cache: str = CACHES[0]
    compiled: bool = False

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        words = f"{self.attention} attention, {threads}, {self.cache} cache"
        return words + ", torch.compile" * self.compiled


class TorchPeer:
    """One base in torch, float32; samples without the overhead of ``generate``."""

    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self._forward, self._compiled = self.base.forward, torch.compile(self.base.forward)
        self.use(Options())

    def use(self, options: Options) -> None:
        """Runs with these options from now on."""
        import torch

        torch.set_num_threads(options.threads)
        self.base.set_attn_implementation(options.attention)
        self.base.forward = self._compiled if options.compiled else self._forward
        self.options = options

    def prefill(self, tokens_BT: np.ndarray) -> np.ndarray:
        """The token that follows each prompt, ``[B]``, with all of the prompts in a cache."""
        import torch
        from transformers import DynamicCache

        tokens = torch.tensor(tokens_BT, dtype=torch.long)
        cached = {"past_key_values": DynamicCache(config=self.base.config), "use_cache": True}
        with torch.inference_mode():
            logits = self.base(tokens, **cached, logits_to_keep=1).logits
            return logits[:, -1].argmax(-1).numpy()

    def decoder(self, tokens_BT: np.ndarray, new_tokens: int) -> Callable[[], np.ndarray]:
        """Reads all but the last token of each prompt into a cache; returns a call that draws ``[B,
        new_tokens]`` greedily behind the prompts, and forgets them again.
        """
        import torch
        from transformers import DynamicCache, StaticCache

        tokens = torch.tensor(tokens_BT, dtype=torch.long)
        rows, length = tokens.shape
        static = self.options.cache == "static"
        cache: Any = DynamicCache(config=self.base.config)
        if static:
            cache = StaticCache(config=self.base.config, max_cache_len=length - 1 + new_tokens)
        cached = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        with torch.inference_mode():
            self.base(tokens[:, :-1], **cached)

        def draw() -> np.ndarray:
            at, out = tokens[:, -1:], []
            with torch.inference_mode():
                for i in range(new_tokens):
                    places = torch.full((rows, 1), length - 1 + i)
                    logits = self.base(at, **cached, position_ids=places).logits
                    at = logits[:, -1].argmax(-1, keepdim=True)
                    out.append(at)
                if static:
                    for layer in cache.layers:
                        layer.cumulative_length.sub_(new_tokens)
                else:
                    cache.crop(-new_tokens)
            return torch.cat(out, 1).numpy()

        return draw


class PeftPeer(TorchPeer):
    """The base with several LoRA adapters (PEFT directories), each with its own AdamW."""

    def __init__(self, directory: Path, adapters: Mapping[str, Path], learning_rate: float):
        import torch
        from peft import PeftModel

        super().__init__(directory)
        (first, path), *rest = adapters.items()
        self.model = PeftModel.from_pretrained(
            self.base, path, adapter_name=first, is_trainable=True
        ).train()
        for name, path in rest:
            self.model.load_adapter(path, adapter_name=name, is_trainable=True)
        how = {"lr": learning_rate, "weight_decay": 0.0, "foreach": True}
        self.weights = {
            name: [p for key, p in self.model.named_parameters() if f".{name}." in key]
            for name in adapters
        }
        self.optimizers = {n: torch.optim.AdamW(own, **how) for n, own in self.weights.items()}

    def update(
        self,
        name: str,
        tokens_BT: np.ndarray,
        prompt: int,
        advantages_B: np.ndarray,
        old_logp_BC: np.ndarray,
    ) -> float:
        """One policy-gradient update of one adapter on rows of ``prompt`` + C tokens; returns the
        loss before it.
        """
        import torch
        import torch.nn.functional as F

        self.model.set_adapter(name)
        tokens = torch.tensor(tokens_BT, dtype=torch.long)
        targets = tokens[:, prompt:]
        logits = self.model(tokens, logits_to_keep=targets.shape[1] + 1).logits[:, :-1]
        logp = -F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        ratio = torch.exp(logp - torch.tensor(old_logp_BC))
        loss = -(ratio * torch.tensor(advantages_B)[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights[name], 1.0)
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return float(loss.detach())

    def updates(self, each: Sequence[tuple[Any, ...]]) -> float:
        """``update`` with one adapter's arguments after another; the sum of their losses."""
        return sum(self.update(*arguments) for arguments in each)

    def generate(
        self, prompts_BT: np.ndarray, adapters: Sequence[str], new_tokens: int
    ) -> np.ndarray:
        """Greedy continuations ``[B, new_tokens]``, every row with its own adapter (PEFT's mixed
        batch).
        """
        import torch

        tokens = torch.tensor(prompts_BT, dtype=torch.long)
        self.model.eval()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                adapter_names=list(adapters),
                do_sample=False,
                pad_token_id=0,
                cache_implementation=self.options.cache,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
            )
        self.model.train()
        return out[:, tokens.shape[1] :].numpy()


class Work(NamedTuple):
    """A method of ``PeftPeer`` and its arguments, which can be sent to another process."""

    method: str
    arguments: tuple[Any, ...]

    def __call__(self, peer: PeftPeer) -> Any:
        return getattr(peer, self.method)(*self.arguments)


def search(
    peer: TorchPeer,
    make: Callable[[], Callable[[], Any]],
    caches: Sequence[str] = CACHES,
    trials: int = 4,
) -> dict[str, float]:
    """Takes the options with which a call is the fastest; returns options -> seconds.

    Fields are tried one after another, each from the fastest options so far.

    Args:
        caches: kinds of cache that matter to the call.
        trials: of each option, the first of which makes what is made once. The least counts: one
            disturbed call made one thread the fastest for 32 rows.
    """
    times: dict[Options, float] = {}
    for field, values in {"threads": THREADS, "attention": ATTENTION, "cache": caches}.items():
        start = min(times, key=times.__getitem__, default=Options())
        for value in values:
            options = start._replace(**{field: value})
            if options not in times:
                peer.use(options)
                call = make()
                times[options] = min(timing.seconds_of(call) for _ in range(trials))
    peer.use(min(times, key=times.__getitem__))
    return {str(options): round(seconds, 3) for options, seconds in times.items()}


def fastest(
    made: tuple[Any, ...], works: Mapping[str, Work], compile_s: float
) -> tuple[dict[str, Options], dict[str, dict[str, Any]]]:
    """Returns the fastest options of each work, and what was tried: options -> seconds, or a
    reason. ``made`` makes a ``PeftPeer``; ``compile_s`` limits the compilation of all works, 0:
    none.
    """
    peer, best, tried = PeftPeer(*made), {}, {}
    for name, work in timing.counted("the peer's options", works.items()):
        caches = CACHES if work.method == "generate" else CACHES[:1]
        tried[name] = search(peer, lambda w=work: functools.partial(w, peer), caches, trials=2)
        best[name] = peer.options
    if compile_s > 0:
        wanted = {n: (best[n]._replace(compiled=True), work) for n, work in works.items()}
        for name, found in compiled_seconds(made, wanted, compile_s).items():
            if not isinstance(found, str) and found < min(tried[name].values()):
                best[name] = wanted[name][0]
            tried[name][str(wanted[name][0])] = found
    return best, tried


def compiled_seconds(
    made: tuple[Any, ...], wanted: Mapping[str, tuple[Options, Work]], limit_s: float
) -> dict[str, float | str]:
    """Seconds of each work as ``torch.compile`` makes it, or the reason why there are none."""
    out, deadline = dict[str, float | str](), time.monotonic() + limit_s
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its end stops what still compiles
        jobs = {name: pool.apply_async(_compiled, (made, *one)) for name, one in wanted.items()}
        for name, job in jobs.items():
            try:
                out[name] = job.get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                out[name] = f"not compiled in {limit_s:.0f} s"
            except Exception as error:
                words = (str(error).splitlines() or [""])[0][:160]
                out[name] = f"failed: {type(error).__name__}: {words}"
    return out


def _compiled(made: tuple[Any, ...], options: Options, work: Work) -> float:
    peer = PeftPeer(*made)
    peer.use(options)
    work(peer)
    return round(timing.seconds_of(lambda: work(peer)), 3)
