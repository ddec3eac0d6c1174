"""Sampled sequences for training; clients' provenance spans name them. Training replays the experts
that sampling visited (R3), and ``stable_reinforce`` reads the log-probabilities of sampled tokens.

Axes: N tokens, L layers, X experts per token.
"""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mint_jax.errors import UserError
from mint_jax.rollout.request import Completion
from mint_jax.service.training_calls import ForwardBackward
from mint_jax.train.blocks import Datum

KEPT_BYTES = 1 << 28  # of sequences


class Sampled(NamedTuple):
    """Arrays of one completion: float32 ``[N]``; routes as in ``Completion``."""

    logprobs: np.ndarray
    routes: np.ndarray | None
    prompt_routes: np.ndarray | None


class Sequences:
    """The newest sampled sequences, thread-safe: of a base with experts (``routed``) all, of others
    those that were recorded.
    """

    def __init__(self, routed: bool):
        self.routed, self._nbytes, self._lock = routed, 0, threading.Lock()
        # by tenant and id
        self._kept: collections.OrderedDict[tuple[str, str], Sampled] = collections.OrderedDict()

    def add(self, id: str, tenant: str, completion: Completion, recorded: bool = False) -> None:
        """Keeps a tenant's completion, and drops the oldest beyond ``KEPT_BYTES``."""
        if not self.routed and not recorded:
            return
        logprobs = np.array(completion.drawn_logprobs, np.float32)
        one = Sampled(logprobs, completion.routes, completion.prompt_routes)
        with self._lock:
            self._kept[tenant, id] = one
            self._nbytes += _nbytes(one)
            while self._nbytes > KEPT_BYTES and len(self._kept) > 1:
                self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])

    def find(self, id: str, tenant: str) -> Sampled | None:
        """Returns a sequence; None if it is no longer kept, or another tenant's."""
        return self._kept.get((tenant, id))

    def complete(self, call: ForwardBackward, spans: Sequence[Any], tenant: str) -> ForwardBackward:
        """Returns a call whose data replay the experts that sampling visited, where known, and have
        the sampled log-probabilities where they lack ``old_logp``. ``spans``: of each datum, its
        prompts or completions in order, as (kind, id, offset, length), first of its input, then of
        its targets. Raises ``UserError``: log-probabilities are missing and unknown.
        """
        data = list(call.data)
        for i, (of_input, of_targets) in enumerate(spans):
            if self.routed:
                routes = self._routes_of(of_input, data[i].tokens.size, tenant)
                data[i] = dataclasses.replace(data[i], routes=routes)
            if data[i].advantages is not None and data[i].old_logp is None:
                data[i] = self._with_logprobs(data[i], of_targets, tenant)
        return dataclasses.replace(call, data=data)

    def _with_logprobs(self, datum: Datum, spans: Sequence[Any], tenant: str) -> Datum:
        out, start = np.zeros(datum.tokens.size, np.float32), 0
        for kind, id, offset, length in spans:
            if kind == "sampled":
                found = self.find(id, tenant)
                part = () if found is None else found.logprobs[offset : offset + length]
                if len(part) != length:
                    raise UserError(
                        f"tokens {offset} to {offset + length} of sequence {id[:80]!r} are not kept"
                        " here: sample with record_stability_info, or send logprobs"
                    )
                out[start : start + length] = part
            start += length
        return dataclasses.replace(datum, old_logp=out, ref_logp=out)

    def _routes_of(self, spans: Sequence[Any], count: int, tenant: str) -> np.ndarray | None:
        """Returns experts of ``count`` tokens, ``[N, L, X]`` int16, -1 where unknown, or None."""
        out, start = None, 0
        for kind, id, offset, length in spans:
            found = self.find(id, tenant)
            if found is not None and (routes := _routes(found, kind == "prompt")) is not None:
                if out is None:
                    out = np.full((count, *routes.shape[1:]), -1, np.int16)
                part = routes[offset : offset + length][: max(0, count - start)]
                out[start : start + len(part)] = part
            start += length
        return out


def _nbytes(one: Sampled) -> int:
    return 500 + sum(array.nbytes for array in one if array is not None)


def _routes(one: Sampled, prompt: bool) -> np.ndarray | None:
    """Returns the routes of a prompt's or a completion's tokens, ``[N, L, X]``."""
    # ``routes`` begin with the prompt's last token; no step has read the completion's last one
    routes, prompt_routes = one.routes, one.prompt_routes
    if not prompt:
        return None if routes is None else routes[1:]
    if routes is None or prompt_routes is None:
        return prompt_routes
    return np.concatenate([prompt_routes, routes[:1]])
