"""Log-probabilities of given token sequences under the base or under adapters, mixed in one batch.

Axes: B rows, T tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mint_jax import multihost, sharding
from mint_jax.data.buckets import ShapeBook
from mint_jax.errors import UserError
from mint_jax.lora.tree import Slot, Stacks, check_resident
from mint_jax.lora.view import AdapterView, bind_blocks, plan_blocks
from mint_jax.models.base import Base
from mint_jax.models.config import ModelConfig
from mint_jax.models.logprobs import logprobs_and_entropy
from mint_jax.models.precision import as_stored
from mint_jax.models.transformer import DecoderInputs, hidden_states


@functools.partial(jax.jit, static_argnames=("cfg",))
@as_stored
def next_token_logprobs(
    params: Any, lora: AdapterView | None, tokens_BT: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """Returns ``log p(tokens[t + 1] | tokens[:t + 1])``, ``[B, T - 1]`` float32."""
    B, T = tokens_BT.shape
    inputs = sharding.constrain(tokens_BT[:, :-1], "batch", "tokens")
    positions = jnp.broadcast_to(jnp.arange(T - 1, dtype=jnp.int32), (B, T - 1))
    h, _ = hidden_states(params, lora, DecoderInputs(inputs, positions), cfg)
    return logprobs_and_entropy(params, lora, h, tokens_BT[:, 1:], cap=cfg.logit_cap)[0]


class Scorer:
    """Scores sequences of any length in batches of similar length, of at most ``max_tokens`` with
    padding.
    """

    def __init__(self, base: Base, max_tokens: int = 4096):
        self.base = base
        self.max_tokens = max_tokens
        self._shapes = ShapeBook()

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Slot | None] | None = None,
        stacks: Stacks | None = None,
        done: Callable[[dict[int, np.ndarray]], Any] | None = None,
    ) -> list[np.ndarray]:
        """Returns float32 ``[len - 1]`` per sequence in input order; entry i scores token i + 1.
        All sequences are checked first, see ``check``. ``done`` is called after each batch with the
        results of its sequences, by index.
        """
        for n, sequence in enumerate(sequences):
            self.check(sequence, f"sequence {n}")
        adapters = adapters or [None] * len(sequences)
        for slot in adapters:
            check_resident(slot, stacks or {})
        out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
        todo = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        while todo:
            longest = len(sequences[todo[0]])
            rows = len(todo) if longest == 1 else max(1, self.max_tokens // longest)
            group, todo = todo[:rows], todo[rows:]
            if longest > 1:  # sequences of one token have no scores
                own = [sequences[i] for i in group], [adapters[i] for i in group]
                for i, row in zip(group, self._run(*own, stacks or {})):
                    out[i] = row[: len(sequences[i]) - 1]
            if done is not None:
                done({i: out[i] for i in group})
        return out

    def check(self, sequence: Sequence[int], where: str) -> None:
        """Raises ``UserError`` if a sequence is empty, longer than the context, or has ids outside
        the vocabulary.
        """
        cfg = self.base.cfg
        if not sequence:
            raise UserError(f"{where} has no tokens: give at least one")
        if len(sequence) > cfg.context:
            raise UserError(
                f"{where} has {len(sequence)} tokens, more than the context of {cfg.context}:"
                " split it"
            )
        if min(sequence) < 0 or max(sequence) >= cfg.vocab_size:
            wrong = next(token for token in sequence if not 0 <= token < cfg.vocab_size)
            raise UserError(
                f"{where} has token id {wrong}; this base has ids 0 to {cfg.vocab_size - 1}"
            )

    def _run(
        self, sequences: list[Sequence[int]], adapters: list[Slot | None], stacks: Stacks
    ) -> list[np.ndarray]:
        plan = plan_blocks(adapters, self.base.row_multiple)
        (T,) = self._shapes.fit((max(map(len, sequences)),), least=(16,))
        tokens = np.zeros((len(plan.order), min(T, self.base.cfg.context)), np.int32)
        placed = [(row, i) for row, i in enumerate(plan.order) if i is not None]
        for row, i in placed:
            tokens[row, : len(sequences[i])] = sequences[i]
        with jax.set_mesh(self.base.mesh):
            lora = bind_blocks(plan, stacks, self.base.dtype)
            scores = next_token_logprobs(self.base.params, lora, tokens, cfg=self.base.cfg)
            values = multihost.to_host(scores)
        rows = {i: values[row] for row, i in placed}
        return [rows[i] for i in range(len(sequences))]
