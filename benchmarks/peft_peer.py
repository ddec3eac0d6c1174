"""Training and sampling of the same adapters on the same weights by torch, transformers and PEFT.

The peer runs with the options that are fastest here, tried on the work itself: attention, threads,
cache, then ``torch.compile`` in a process with a time limit.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mint_jax.metrics import Progress

ATTENTION = ("sdpa", "eager")
THREADS = tuple(dict.fromkeys((os.cpu_count() or 1, 1)))
CACHES = ("dynamic", "static")


class Options(NamedTuple):
    """Options of the peer; see ``ATTENTION`` and ``CACHES``."""

    attention: str = ATTENTION[0]
    threads: int = THREADS[0]
    cache: str = CACHES[0]
    compiled: bool = False

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        words = f"{self.attention} attention, {threads}, {self.cache} cache"
        return words + ", torch.compile" * self.compiled


class Work(NamedTuple):
    """A method of the peer and its arguments, which can be sent to another process."""

    method: str
    arguments: tuple[Any, ...]

    def __call__(self, peer: "PeftPeer") -> Any:
        return getattr(peer, self.method)(*self.arguments)


class PeftPeer:
    """One base in torch with several LoRA adapters (PEFT directories), each with its own AdamW."""

    def __init__(self, directory: Path, adapters: Mapping[str, Path], learning_rate: float):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self._base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        (first, path), *rest = adapters.items()
        self.model = PeftModel.from_pretrained(
            self._base, path, adapter_name=first, is_trainable=True
        )
        for name, path in rest:
            self.model.load_adapter(path, adapter_name=name, is_trainable=True)
        self.optimizers = {}
        for name in adapters:
            weights = [p for key, p in self.model.named_parameters() if f".{name}." in key]
            self.optimizers[name] = torch.optim.AdamW(
                weights, lr=learning_rate, weight_decay=0.0, foreach=True
            )
        self._forward, self._compiled = self._base.forward, torch.compile(self._base.forward)
        self.use(Options())

    def use(self, options: Options) -> None:
        """Runs with these options from now on."""
        import torch

        torch.set_num_threads(options.threads)
        self._base.set_attn_implementation(options.attention)
        self._base.forward = self._compiled if options.compiled else self._forward
        self.options = options

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
        torch.nn.utils.clip_grad_norm_(self.optimizers[name].param_groups[0]["params"], 1.0)
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
        length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        self.model.eval()
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                adapter_names=list(adapters),
                do_sample=False,
                pad_token_id=0,
                cache_implementation=self.options.cache,
                **length,
            )
        self.model.train()
        return out[:, tokens.shape[1] :].numpy()


def _seconds(peer: PeftPeer, options: Options, work: Work) -> float:
    """Returns the seconds of a call, after one warm-up call."""
    peer.use(options)
    work(peer)
    began = time.perf_counter()
    work(peer)
    return time.perf_counter() - began


def search(
    choices: Mapping[str, tuple[Any, ...]], seconds: Callable[[Options], float]
) -> dict[Options, float]:
    """Returns the seconds of the options that were tried: one field after another, each from the
    fastest options so far.
    """
    times: dict[Options, float] = {}
    for field, values in choices.items():
        start = min(times, key=times.__getitem__) if times else Options()
        for value in values:
            options = start._replace(**{field: value})
            if options not in times:
                times[options] = seconds(options)
    return times


def fastest(
    peer: PeftPeer, made: tuple[Any, ...], works: Mapping[str, Work], compile_s: float
) -> tuple[dict[str, Options], dict[str, dict[str, Any]]]:
    """Returns the fastest options of each work, and what was tried: options -> seconds, or a
    reason. ``made`` makes another such peer; ``compile_s`` limits the compilation of all works, 0:
    none.
    """
    best: dict[str, Options] = {}
    tried: dict[str, dict[str, Any]] = {}
    progress = Progress("the peer's options", len(works))
    for name, work in works.items():
        choices: dict[str, tuple[Any, ...]] = {"attention": ATTENTION, "threads": THREADS}
        if work.method == "generate":
            choices["cache"] = CACHES
        times = search(choices, lambda options, work=work: _seconds(peer, options, work))
        best[name] = min(times, key=times.__getitem__)
        tried[name] = {str(options): round(seconds, 3) for options, seconds in times.items()}
        progress.update(len(best), str(best[name]))
    if compile_s <= 0:
        return best, tried
    wanted = {
        name: (options._replace(compiled=True), works[name]) for name, options in best.items()
    }
    for name, found in compiled_seconds(made, wanted, compile_s).items():
        options = wanted[name][0]
        if not isinstance(found, str) and found < min(tried[name].values()):
            best[name] = options
        tried[name][str(options)] = found
    return best, tried


def compiled_seconds(
    made: tuple[Any, ...], wanted: Mapping[str, tuple[Options, Work]], limit_s: float
) -> dict[str, float | str]:
    """Seconds of each work as ``torch.compile`` makes it, or the reason why there are none."""
    spawn = multiprocessing.get_context("spawn")
    theirs, answer = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_compile, args=(made, dict(wanted), answer), daemon=True)
    process.start()
    answer.close()
    out: dict[str, float | str] = dict.fromkeys(wanted, f"not compiled in {limit_s:.0f} s")
    deadline = time.monotonic() + limit_s
    try:
        while theirs.poll(max(0.0, deadline - time.monotonic())):
            name, found = theirs.recv()
            out[name] = found
    except EOFError:  # all are done
        pass
    process.kill()
    process.join()
    return out


def _compile(
    made: tuple[Any, ...], wanted: Mapping[str, tuple[Options, Work]], answer: Any
) -> None:
    """``compiled_seconds`` in its process."""
    peer = PeftPeer(*made)
    for name, (options, work) in wanted.items():
        try:
            answer.send((name, round(_seconds(peer, options, work), 3)))
        except Exception as error:
            words = (str(error).splitlines() or [""])[0][:160]
            answer.send((name, f"failed: {type(error).__name__}: {words}"))
