"""The calls that the engine makes on the devices: allocate a pool, prefill, decode, swap pages.

A call's input is numbers from the host, and it changes the pool only. With several processes over
one mesh, process 0 decides for all and broadcasts each call before it makes it; the others repeat
the calls (``follow``) without knowing any request. Swapped pages stay in every process that read
them, under a number. ``answer`` sends the completions.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from mint_jax import host, messages, multihost
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import Teams
from mint_jax.rollout import device
from mint_jax.rollout.device import DecodePlan, Drawn, PageMoves, PrefillPlan, PromptScoring
from mint_jax.rollout.request import Completion
from mint_jax.rollout.sample import Penalties, SamplingParams

T = TypeVar("T")
PLANS = PromptScoring, PrefillPlan, PageMoves, Penalties, DecodePlan, SamplingParams, Teams
RECORDS = {record.__name__: record for record in PLANS}
DEVICE_CALLS: dict[str, Callable[..., Any]] = {}


def everywhere(method: Callable[..., T]) -> Callable[..., T]:
    """Makes a method a device call: process 0 sends it to the others before it runs it."""
    name = method.__name__
    DEVICE_CALLS[name] = method

    @functools.wraps(method)
    def call(self: "DeviceCalls", *values: Any) -> T:
        messages.send(name, *values)
        return method(self, *values)

    return call


class DeviceCalls:
    """Device calls of one engine, repeated in every process; see the module.

    Args:
        settings: sizes of the engine, which must be equal in all processes.

    Attributes:
        pool: the pages on the devices; None before ``make``.
        stacks: adapter stacks of the current call.
    """

    def __init__(self, base: Base, keep_routes: bool, settings: Sequence[Any]):
        self.base, self.keep_routes = base, keep_routes
        self.settings = [base.fingerprint, keep_routes, *settings]
        self.pool: Any = None
        self.stacks: Stacks = {}
        self._swapped: dict[int, list[Any]] = {}
        self._visited: dict[int, np.ndarray] = {}  # expert ids of this call, if followers answer
        self._open, self._answered = False, False

    # -- process 0

    def begin(self, answered: bool) -> None:
        """Starts a call of the engine; with ``answered`` followers return the completions too."""
        self._open, self._answered = True, answered and multihost.count() > 1
        messages.send("begin", self.settings, self._answered)

    def answer(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Sends the completions to the followers, without expert ids, which they already have."""
        if self._answered:
            numbers = {id(array): number for number, array in self._visited.items()}
            found = [[_to_message(c, numbers) for c in group] for group in completions]
            messages.send("answers", found)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the call once; an error is raised in every process."""
        self._visited = {}
        if not self._open:
            return
        self._open = False
        if error is None:
            messages.send("end")
            return
        # The caller raises the error. If even this message cannot be sent, the followers notice
        # that by themselves.
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
            text = str(error) or type(error).__name__
            messages.send("fail", isinstance(error, UserError), text)

    # -- device calls

    @everywhere
    def make(self, pages: int) -> None:
        """Allocates an empty pool of ``pages`` pages in each part."""
        self._free()
        cfg, mesh, dtype = self.base.cfg, self.base.mesh, self.base.dtype
        self.pool = device.empty_pool(cfg, mesh, pages, dtype, self.keep_routes)

    @everywhere
    def release(self) -> None:
        """Frees the pool's memory; the next call must be ``make``."""
        self._free()

    @everywhere
    def prefill(self, plan: PrefillPlan) -> Any:
        """Writes blocks into their pages; returns the requested scores as host arrays, or None."""
        args = self.base.params, self.stacks, self.pool, plan
        self.pool, scores = device.prefill(*args, cfg=self.base.cfg)
        return None if scores is None else multihost.to_host(tuple(scores))

    @everywhere
    def decode(self, plan: DecodePlan, steps: int) -> Drawn:
        """Decodes; returns the drawn tokens as host arrays. ``top_ids`` and ``top_logprobs`` are
        empty unless some row has ``top``.
        """
        args = self.base.params, self.stacks, self.pool, plan, np.int32(steps)
        self.pool, drawn = device.decode(*args, cfg=self.base.cfg)
        if not plan.top.any():
            drawn = drawn._replace(top_ids=np.zeros(0), top_logprobs=np.zeros(0))
        return Drawn(*multihost.to_host(tuple(drawn)))

    @everywhere
    def move(self, moves: PageMoves) -> None:
        """Builds pages from the contents of others."""
        self.pool = device.move_pages(self.pool, moves, cfg=self.base.cfg)

    @everywhere
    def swap_out(self, number: int, ids: Sequence[np.ndarray]) -> None:
        """Copies pages to the host in every process, under a new number."""
        self._swapped[number] = self._read(self.pool, ids)

    @everywhere
    def swap_in(self, number: int, ids: Sequence[np.ndarray], shift: int) -> None:
        """Writes a copy into pages, ``shift`` entries after those it was read from, and drops
        it.
        """
        for some, contents in zip(ids, self._swapped.pop(number), strict=True):
            if shift:
                contents = jax.tree.map(lambda x: np.roll(x, shift, axis=1), contents)
            self.pool = device.write_pages(self.pool, some, contents, cfg=self.base.cfg)

    @everywhere
    def discard(self, number: int) -> None:
        """Drops a copy, if ``drop`` has not dropped it already."""
        self._swapped.pop(number, None)

    @everywhere
    def routes(self, number: int, ids: Sequence[np.ndarray], at: int, count: int) -> np.ndarray:
        """Returns the expert ids of ``count`` tokens in pages, ``[count, L, X]``; the part's pages
        begin at entry ``at``. ``number`` names them in ``answer``.
        """
        each = len(ids[0]) // device.page_parts(self.base.cfg, self.base.mesh)
        read = self._read({"routes": self.pool["moe"]["routes"]}, ids)
        # [L, n, PAGE, X]
        whole = np.concatenate([pages["routes"][:, at : at + each] for pages in read], axis=1)
        found = whole.reshape(whole.shape[0], -1, whole.shape[-1])[:, :count].swapaxes(0, 1)
        if self._answered:
            self._visited[number] = found
        return found

    def block_until_ready(self) -> None:
        """Waits until this process's devices have finished all calls so far."""
        jax.block_until_ready(self.pool)

    def drop(self) -> None:
        """Drops the pool and every swapped copy."""
        self.pool, self._swapped = None, {}

    def _free(self) -> None:
        self.pool = None
        # A following rollout or update allocates other sizes, which the freed blocks do not fit.
        if self.base.mesh.devices.flat[0].platform == "cpu":
            host.give_back_freed_memory()

    def _read(self, pool: Any, ids: Sequence[np.ndarray]) -> list[Any]:
        cfg = self.base.cfg
        return [multihost.to_host(device.read_pages(pool, some, cfg=cfg)) for some in ids]

    # -- the other processes

    def follow(self) -> list[list[Completion]]:
        """Repeats the calls of process 0 until its call ends; returns the completions, if sent.

        Raises:
            UserError, RuntimeError: the call failed in process 0, that process died, or it runs
                another engine.
        """
        found: list[list[Completion]] = []
        while True:
            word, values = messages.receive(RECORDS)
            if word in DEVICE_CALLS:
                DEVICE_CALLS[word](self, *values)
            elif word == "begin":
                settings, self._answered = values
                if settings != self.settings:
                    raise RuntimeError(
                        f"process 0 runs an engine of {settings}, this process one of"
                        f" {self.settings}: use the same settings in every process"
                    )
            elif word == "answers":
                found = [[_from_message(c, self._visited) for c in group] for group in values[0]]
            elif word == "end":
                self._visited = {}
                return found
            elif word == "fail":
                is_user_error, text = values
                raise (
                    UserError(text) if is_user_error else RuntimeError(f"process 0 failed: {text}")
                )
            else:
                raise RuntimeError(
                    f"process 0 sent {word!r}, which this process does not know: run the same"
                    " version in every process"
                )


NUMBERS = {"tokens": np.int32, "logprobs": np.float64, "drawn_logprobs": np.float64}
PAIRS = ("top_logprobs", "top_prompt_logprobs", "prompt_alternatives")  # lists of lists of tuples
ROUTES = ("routes", "prompt_routes")


def _to_message(one: Completion, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Returns a completion as a message, with the numbers of its arrays of expert ids, keyed by
    the array's ``id``.
    """
    out = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
    out |= {name: np.array(out[name], dtype) for name, dtype in NUMBERS.items()}
    return out | {name: None if out[name] is None else numbers[id(out[name])] for name in ROUTES}


def _from_message(message: Mapping[str, Any], routes: Mapping[int, np.ndarray]) -> Completion:
    out: dict[str, Any] = dict(message)
    out |= {name: out[name].tolist() for name in NUMBERS}
    for name in PAIRS:
        if out[name] is not None:
            out[name] = [[tuple(pair) for pair in place] for place in out[name]]
    out |= {name: None if out[name] is None else routes[out[name]] for name in ROUTES}
    return Completion(**out)
