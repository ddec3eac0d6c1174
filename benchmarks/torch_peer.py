"""Greedy sampling without adapters by torch and transformers on the same checkpoint, with the
fastest options for the work and without the overhead of ``generate``.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peft_peer import ATTENTION, CACHES, THREADS, Options, search

TRIALS = 4  # of each option, the first of which makes what is made once


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class TorchPeer:
    """One base in torch, float32."""

    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.use(Options())

    def use(self, options: Options) -> None:
        """Runs with these options from now on."""
        import torch

        torch.set_num_threads(options.threads)
        self.model.set_attn_implementation(options.attention)
        self.options = options

    def prefill(self, tokens_BT: np.ndarray) -> np.ndarray:
        """The token that follows each prompt, ``[B]``, with all of the prompts in a cache."""
        import torch
        from transformers import DynamicCache

        tokens = torch.tensor(tokens_BT, dtype=torch.long)
        with torch.inference_mode():
            cache = DynamicCache(config=self.model.config)
            logits = self.model(
                tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
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
        cache: Any = DynamicCache(config=self.model.config)
        if static:
            cache = StaticCache(config=self.model.config, max_cache_len=length - 1 + new_tokens)
        with torch.inference_mode():
            self.model(tokens[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)

        def draw() -> np.ndarray:
            at, out = tokens[:, -1:], []
            with torch.inference_mode():
                for i in range(new_tokens):
                    places = torch.full((rows, 1), length - 1 + i)
                    logits = self.model(
                        at,
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                        position_ids=places,
                    ).logits
                    at = logits[:, -1].argmax(-1, keepdim=True)
                    out.append(at)
                if static:
                    for layer in cache.layers:
                        layer.cumulative_length.sub_(new_tokens)
                else:
                    cache.crop(-new_tokens)
            return torch.cat(out, 1).numpy()

        return draw

    def fastest(
        self, make: Callable[[], Callable[[], Any]], caches: tuple[str, ...] = CACHES
    ) -> dict[str, float]:
        """Takes the options with which a call is the fastest; returns options -> seconds.
        ``caches`` are the kinds of cache that matter to it.
        """

        def seconds(options: Options) -> float:
            self.use(options)
            call = make()
            # The least of several: one disturbed call made one thread the fastest for 32 rows.
            return min(_seconds(call) for _ in range(TRIALS))

        choices = {"threads": THREADS, "attention": ATTENTION, "cache": caches}
        times = search(choices, seconds)
        self.use(min(times, key=times.__getitem__))
        return {str(options): round(seconds, 3) for options, seconds in times.items()}
