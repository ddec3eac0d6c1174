"""The peer: torch, transformers and PEFT training and sampling the same adapters on the same weights.

Its options are tried, and the fastest measured: fused or written-out attention, one thread or all; logits are computed only
where a loss needs them.
"""

import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ATTENTION = ("sdpa", "eager")
THREADS = (1, os.cpu_count() or 1)


class PeftPeer:
    """One base in torch with several LoRA adapters, each with its own AdamW.

    Args:
        directory: checkpoint of the base.
        adapters: name -> PEFT directory.
        learning_rate: of every adapter.
        attention: an entry of ``ATTENTION``.
        threads: that torch uses from now on.
    """

    def __init__(self, directory: Path, adapters: Mapping[str, Path], learning_rate: float, attention: str, threads: int):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
        (first, path), *others = adapters.items()
        self.model = PeftModel.from_pretrained(model, path, adapter_name=first, is_trainable=True)
        for name, path in others:
            self.model.load_adapter(path, adapter_name=name, is_trainable=True)
        self.optimizers = {}
        for name in adapters:
            mine = [p for key, p in self.model.named_parameters() if f".{name}." in key]
            self.optimizers[name] = torch.optim.AdamW(mine, lr=learning_rate, weight_decay=0.0, foreach=True)

    def update(self, name: str, tokens_BT: np.ndarray, prompt: int, advantages_B: np.ndarray, old_logp_BC: np.ndarray) -> float:
        """One policy-gradient update of one adapter on rows of ``prompt`` + C tokens; returns the loss before it."""
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

    def generate(self, prompts_BT: np.ndarray, adapters: Sequence[str], new_tokens: int) -> np.ndarray:
        """Greedy continuations ``[B, new_tokens]``, every row with its own adapter (PEFT's mixed batch)."""
        import torch

        tokens = torch.tensor(prompts_BT, dtype=torch.long)
        self.model.eval()
        try:
            with torch.inference_mode():
                out = self.model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    adapter_names=list(adapters),
                    do_sample=False,
                    min_new_tokens=new_tokens,
                    max_new_tokens=new_tokens,
                    pad_token_id=0,
                )
        finally:
            self.model.train()
        return out[:, tokens.shape[1] :].numpy()


def fastest(directory: Path, adapters: Mapping[str, Path], learning_rate: float, trial: Any) -> tuple[PeftPeer, str]:
    """The peer with the options that make ``trial(peer)`` fastest, after one warm-up call each, and their names."""
    timed = []
    for attention, threads in itertools.product(ATTENTION, sorted(set(THREADS))):
        peer = PeftPeer(directory, adapters, learning_rate, attention, threads)
        trial(peer)
        began = time.perf_counter()
        trial(peer)
        timed.append((time.perf_counter() - began, attention, threads))
        del peer
    _, attention, threads = min(timed)
    return PeftPeer(directory, adapters, learning_rate, attention, threads), f"{attention}, {threads} threads"
