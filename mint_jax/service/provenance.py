"""Routes of sampled sequences for training (R3): clients' provenance spans name sequences that were
sampled here, and training replays the experts that sampling visited.

Axes: N tokens, L layers, X experts per token.
"""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.rollout.request import Completion
from mint_jax.service.training_calls import ForwardBackward

KEPT_BYTES = 1 << 28  # of routes


class Sequences:
    """The newest sampled completions, thread-safe; none of a base without experts (``routed``)."""

    def __init__(self, routed: bool):
        self.routed, self._nbytes, self._lock = routed, 0, threading.Lock()
        # by tenant and id
        self._kept: collections.OrderedDict[tuple[str, str], Completion] = collections.OrderedDict()

    def add(self, id: str, tenant: str, completion: Completion) -> None:
        """Keeps a tenant's completion, and drops the oldest beyond ``KEPT_BYTES``."""
        if not self.routed:
            return
        with self._lock:
            self._kept[tenant, id] = completion
            self._nbytes += _nbytes(completion)
            while self._nbytes > KEPT_BYTES and len(self._kept) > 1:
                self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])

    def find(self, id: str, tenant: str) -> Completion | None:
        """Returns a completion; None if it is no longer kept, or another tenant's."""
        return self._kept.get((tenant, id))

    def with_routes(
        self, call: ForwardBackward, spans: Sequence[Sequence[Any]], tenant: str
    ) -> ForwardBackward:
        """Returns a call whose data replay the experts that sampling visited, where known. Spans of
        a datum are its prompts or completions in order, as (kind, id, offset, length).
        """
        if not self.routed:
            return call
        data = [
            dataclasses.replace(datum, routes=self._routes_of(parts, datum.tokens.size, tenant))
            for datum, parts in zip(call.data, spans)
        ]
        return dataclasses.replace(call, data=data)

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


def _nbytes(completion: Completion) -> int:
    arrays = completion.routes, completion.prompt_routes
    return sum(array.nbytes for array in arrays if array is not None)


def _routes(completion: Completion, prompt: bool) -> np.ndarray | None:
    """Returns the routes of a prompt's or a completion's tokens, ``[N, L, X]``."""
    # ``routes`` begin with the prompt's last token; no step has read the completion's last one
    routes, prompt_routes = completion.routes, completion.prompt_routes
    if not prompt:
        return None if routes is None else routes[1:]
    if routes is None or prompt_routes is None:
        return prompt_routes
    return np.concatenate([prompt_routes, routes[:1]])
