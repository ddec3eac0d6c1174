"""Routes of sampled sequences, replayed in training on them (R3): a client's provenance spans name
sequences that were sampled here.
"""

import collections
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mint_jax.rollout.request import Completion
from mint_jax.service.calls import ForwardBackward

KEPT_BYTES = 1 << 28  # of sampled sequences' routes that are kept for training on them


class Sequences:
    """Completions that were sampled here, by their ids: the newest, within ``most_bytes`` of
    routes.

    Args:
        routed: whether the base has experts; without, nothing is kept and nothing found.
    """

    def __init__(self, routed: bool, most_bytes: int = KEPT_BYTES):
        self.routed, self.most_bytes = routed, most_bytes
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[str, tuple[str, Completion]] = collections.OrderedDict()
        self._nbytes = 0

    @staticmethod
    def _size(completion: Completion) -> int:
        return sum(
            array.nbytes
            for array in (completion.routes, completion.prompt_routes)
            if array is not None
        )

    def add(self, id: str, tenant: str, completion: Completion) -> None:
        """Keeps a sequence for its tenant; the oldest ones go. From any thread."""
        if not self.routed:
            return
        with self._lock:
            self._held[id] = tenant, completion
            self._nbytes += self._size(completion)
            while self._nbytes > self.most_bytes and len(self._held) > 1:
                _, (_, gone) = self._held.popitem(last=False)
                self._nbytes -= self._size(gone)

    def find(self, id: str, tenant: str) -> Completion | None:
        """A sequence's completion; None where it is no longer kept, or another tenant's."""
        with self._lock:
            owner, found = self._held.get(id, (None, None))
        return found if owner == tenant else None

    def with_routes(
        self, call: ForwardBackward, spans: Sequence[Sequence[Any]], tenant: str
    ) -> ForwardBackward:
        """A request whose data replay the experts that sampling visited, as far as their spans tell
        and routes are kept.

        Args:
            spans: of each datum, in its order; each names a part of a sequence's prompt or of its
                tokens, as (kind, id, offset, length).
        """
        routes = [
            self._routes_of(mine, datum.tokens.size, tenant)
            for datum, mine in zip(call.data, spans)
        ]
        if not any(one is not None for one in routes):
            return call
        return dataclasses.replace(
            call,
            data=[dataclasses.replace(datum, routes=one) for datum, one in zip(call.data, routes)],
        )

    def _routes_of(self, spans: Sequence[Any], count: int, tenant: str) -> np.ndarray | None:
        """Experts that a datum's ``count`` tokens visited when they were sampled here, ``[N, L,
        X]``, -1 where that is not known.
        """
        if not self.routed or not spans:
            return None
        parts = []
        for kind, id, offset, length in spans:
            found = self.find(id, tenant)
            whole = (
                None
                if found is None
                else _of_prompt(found)
                if kind == "prompt"
                else _of_tokens(found)
            )
            parts.append((length, None if whole is None else whole[offset : offset + length]))
        if (like := next((part for _, part in parts if part is not None), None)) is None:
            return None
        out = np.full((count, *like.shape[1:]), -1, np.int16)
        start = 0
        for length, part in parts:
            if part is not None:
                out[start : start + len(part)] = part[: max(0, count - start)]
            start += length
        return out


def _of_prompt(completion: Completion) -> np.ndarray | None:
    """Routes of all tokens of a prompt: its last token's are those before the first token drawn."""
    if completion.prompt_routes is None or completion.routes is None:
        return completion.prompt_routes
    return np.concatenate([completion.prompt_routes, completion.routes[:1]])


def _of_tokens(completion: Completion) -> np.ndarray | None:
    """Routes of the tokens drawn, but for the last, which no step has read."""
    return None if completion.routes is None else completion.routes[1:]
