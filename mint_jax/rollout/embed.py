"""Vectors of prompts, for routing: the base's final hidden state at a prompt's last token, from
which the next token would be drawn, with its norm divided out.

The mean state over the prompt is no substitute. For 96 prompts of ``benchmarks/routes.py`` over
SmolLM2, which differ in a date and in the language to answer in, the nearest of 24 policies was of
the right language for 47 % by the mean state, and for 99 % by the last one.

Axes: B rows, T tokens, D model width.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax import multihost
from mint_jax.compiling import Program, abstract
from mint_jax.models.base import Base
from mint_jax.models.config import ModelConfig
from mint_jax.models.precision import as_stored
from mint_jax.models.transformer import DecoderInputs, hidden_states

TOKENS = (16, 64, 512)  # of a program; of a longer prompt the last 512 tokens count


@functools.partial(jax.jit, static_argnames=("cfg",))
@as_stored
def prompt_vectors(
    params: Any, tokens_BT: jax.Array, lengths_B: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """Returns the vectors of prompts, ``[B, D]`` float32; a row's tokens come first."""
    B, T = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    h_BTD, _ = hidden_states(params, None, DecoderInputs(tokens_BT, positions_BT), cfg)
    last_B11 = (lengths_B - 1)[:, None, None]
    last_BD = jnp.take_along_axis(h_BTD, last_B11, axis=1)[:, 0].astype(jnp.float32)
    return last_BD / jnp.linalg.norm(last_BD, axis=-1, keepdims=True)


class Embedder:
    """Makes the vectors of prompts, one row a call, padded to few lengths: all programs are known
    before. Calls are of the thread that owns the devices.
    """

    def __init__(self, base: Base):
        self.base = base
        self._lengths = sorted({min(length, base.cfg.context) for length in TOKENS})

    def __call__(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Returns ``[N, D]`` float32 of N prompts, each of at least one token."""
        out = np.zeros((len(prompts), self.base.cfg.d_model), np.float32)
        for i, prompt in enumerate(prompts):
            end = prompt[-self._lengths[-1] :]
            T = next(length for length in self._lengths if length >= len(end))
            tokens, lengths = self._inputs(T)
            tokens[0, : len(end)], lengths[0] = end, len(end)
            with jax.set_mesh(self.base.mesh):
                found = prompt_vectors(self.base.params, tokens, lengths, cfg=self.base.cfg)
                out[i] = multihost.to_host(found)[0]
        return out

    def _inputs(self, T: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and lengths of as many rows as the mesh divides; the first one is used."""
        rows = self.base.row_multiple
        return np.zeros((rows, T), np.int32), np.ones(rows, np.int32)

    def programs(self) -> list[Program]:
        """Returns the programs of all calls, for compiling ahead."""

        def build(length: int) -> None:
            tokens, lengths = self._inputs(length)
            with jax.set_mesh(self.base.mesh):
                params = abstract(self.base.params)
                prompt_vectors.lower(params, tokens, lengths, cfg=self.base.cfg).compile()

        return [
            Program(("vectors", T), f"vectors of {T} tokens", functools.partial(build, T), 2)
            for T in self._lengths
        ]
