"""The engine's paged KV cache on the devices, and its device calls: prefill, decode, page swaps.

A call's input is numbers from the host, and it changes the pool only. With several processes over
one mesh, process 0 decides for all and broadcasts each call before it makes it; the others repeat
the calls (``follow``) without knowing any request. Swapped pages stay in every process that read
them, under a number. ``answer`` sends the completions.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from mint_jax import host, messages, multihost
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import PAGE, StateSlots, Teams
from mint_jax.rollout import device, plans
from mint_jax.rollout.device import DecodePlan, Drawn, PageMoves, PrefillPlan, PromptScoring
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.plans import NOWHERE
from mint_jax.rollout.request import Completion, Request
from mint_jax.rollout.sample import Penalties, SamplingParams
from mint_jax.rollout.samples import own_pages, pages_needed
from mint_jax.rollout.scheduler import Moves

T = TypeVar("T")
CACHE_BYTES = 1 << 30  # on CPUs; accelerators use CACHE_SHARE of their free memory
CACHE_SHARE = 0.6
LEAST_PAGES = 16
SWAP_PAGES = 8  # pages of each part in one swap call
PLANS = PromptScoring, PrefillPlan, Penalties, DecodePlan, SamplingParams, StateSlots, Teams
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


class SwappedPages(NamedTuple):
    """Number of page contents on the host, and the mesh part that they were read from."""

    number: int
    part: int


RECORDS = {record.__name__: record for record in (*PLANS, SwappedPages)}


class DeviceCalls:
    """KV cache and device calls of one engine, repeated in every process; see the module.

    Args:
        rows, blocks: maximum number of rows that decode together, and blocks of a prefill, over all
            parts.
        nbytes: maximum bytes of the cache over all devices; None uses ``CACHE_BYTES`` or
            ``CACHE_SHARE``.
        settings: sizes of the engine, equal in all processes.

    Attributes:
        pages, most, states: of each part, the allocated and the maximum pages, and slots of states.
        kinds: kinds of the pool's parts, see ``device.kinds``.
    """

    def __init__(
        self,
        base: Base,
        keep_routes: bool,
        rows: int,
        blocks: int,
        nbytes: int | None,
        settings: Sequence[Any],
    ):
        self.base, self.keep_routes, self.rows = base, keep_routes, rows
        self.settings = [base.fingerprint, keep_routes, *settings]
        self.parts = device.page_parts(base.cfg, base.mesh)
        self.pool: Any = None
        self.stacks: Stacks = {}
        self._numbers = itertools.count()
        self._swapped: dict[int, dict[str, list[Any]]] = {}
        self._visited: dict[int, np.ndarray] = {}  # expert ids of this call, if followers answer
        self._open, self._answered = False, False
        self.kinds = device.kinds(base.cfg)
        each = -(-rows // self.parts)
        self.states = plans.state_slots(each) if "states" in self.kinds else 0
        windows, here = base.cfg.windows, blocks // self.parts
        self._most_near = 0 if windows is None else plans.near_pages(windows.size, each, here)
        self.pages = 0
        self.most = multihost.agree("pages of the cache", lambda: self._count(nbytes))

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

    def ensure_capacity(self, requests: Sequence[Request] | None) -> bool:
        """Grows the cache to its maximum, or to hold a sample of ``requests`` in every row. Returns
        True if it was reallocated and is now empty.
        """
        wanted = self.most
        if requests is not None:
            # Samples of a request share the prompt's pages, so the prompt counts once and each
            # further sample adds its own pages. Counting prompts per sample gave 32 samples of 8
            # prompts of SmolLM2 189 MB instead of 94.
            sizes = [n for r in requests for n in (pages_needed(r), *[own_pages(r)] * (r.n - 1))]
            longest = sorted(sizes, reverse=True)[: self.rows]
            needed = max(LEAST_PAGES, sum(longest[:: self.parts]) + max(longest, default=0))
            # Few sizes, because each is one more shape to compile.
            power = 1 << (needed - 1).bit_length()
            wanted = min(wanted, power // 4 * 3 if needed <= power // 4 * 3 else power)
        if self.pool is not None and self.pages >= wanted:
            return False
        self.make(max(self.pages, wanted))
        return True

    def near(self, pages: int) -> int:
        """Returns the near pages of each part of a pool."""
        return min(pages, self._most_near)

    def sizes(self, pages: int) -> tuple[Any, ...]:
        """Returns the arguments of ``device.empty_pool`` after the mesh."""
        return pages, self.base.dtype, self.keep_routes, self.states, self.near(pages)

    def _count(self, nbytes: int | None) -> int:
        """Returns the pages of each part that fit in ``nbytes``."""
        mesh, cfg = self.base.mesh, self.base.cfg
        if nbytes is None:
            nbytes, is_on_cpu = CACHE_BYTES, mesh.devices.flat[0].platform == "cpu"
            if not is_on_cpu and (stats := jax.local_devices()[0].memory_stats()):
                free = stats["bytes_limit"] - stats["bytes_in_use"]
                nbytes = int(CACHE_SHARE * free) * mesh.size
        sizes = cfg, self.base.dtype, self.keep_routes, device.lanes(mesh)
        one, far = device.page_bytes(*sizes), device.page_bytes(*sizes, near=0)
        each = nbytes // self.parts
        count = each // one
        if count > self._most_near:  # further pages have no near ones
            count = (each - self._most_near * (one - far)) // far
        if count < 2:
            raise UserError(
                f"a cache of {nbytes:,} bytes cannot hold two pages of {one:,} bytes in each of"
                f" {self.parts} parts: raise cache_gib"
            )
        # Enough for all rows at full context, and as much again for cached prompts.
        return min(count, 2 * -(-self.rows // self.parts) * (pages_for(cfg.context, PAGE) + 2))

    # -- device calls

    @everywhere
    def make(self, pages: int) -> None:
        """Allocates an empty pool of ``pages`` pages in each part, and the slots of states."""
        self._free()
        self.pages = pages
        self.pool = device.empty_pool(self.base.cfg, self.base.mesh, *self.sizes(pages))

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
    def move(self, part: int, moves: Moves, near_moves: Moves) -> None:
        """Builds pages and near pages of one part."""
        for kind, all_ in (("pages", moves), ("near", near_moves)):
            for i in range(0, len(all_), SWAP_PAGES):
                plan = np.zeros((5, self.parts * SWAP_PAGES), np.int32)
                plan[4] = NOWHERE
                some = np.array(all_[i : i + SWAP_PAGES], np.int32).T
                plan[:, part * SWAP_PAGES : part * SWAP_PAGES + some.shape[1]] = some
                pool = device.part_of(self.pool, self.base.cfg, kind)
                self.pool |= device.move_pages(pool, PageMoves(*plan), cfg=self.base.cfg)

    @everywhere
    def swap_out(self, part: int, places: Mapping[str, Sequence[int]]) -> SwappedPages:
        """Copies the contents of places of one part, by kind, to the host."""
        swapped = SwappedPages(next(self._numbers), part)
        self._swapped[swapped.number] = {
            kind: self._read(device.part_of(self.pool, self.base.cfg, kind), part, places[kind])
            for kind in self.kinds
        }
        return swapped

    @everywhere
    def swap_in(
        self, swapped: SwappedPages, part: int, places: Mapping[str, Sequence[int]]
    ) -> None:
        """Writes the contents into as many places of any part, and drops the copy."""
        shift, copies = (part - swapped.part) * SWAP_PAGES, self._swapped.pop(swapped.number)
        for kind in self.kinds:
            ids = self._ids(part, places[kind], NOWHERE)
            for some, contents in zip(ids, copies[kind], strict=True):
                if shift:
                    contents = jax.tree.map(lambda x: np.roll(x, shift, axis=1), contents)
                pool = device.part_of(self.pool, self.base.cfg, kind)
                self.pool |= device.write_pages(pool, some, contents, cfg=self.base.cfg)

    @everywhere
    def discard(self, swapped: SwappedPages) -> None:
        # ``drop`` may have dropped it already.
        self._swapped.pop(swapped.number, None)

    @everywhere
    def routes(self, part: int, pages: Sequence[int], count: int) -> np.ndarray:
        """Returns the expert ids of the first ``count`` tokens in pages, ``[count, L, X]``."""
        read = self._read(self.pool["routes"], part, pages[: pages_for(count, PAGE)])
        own = np.s_[:, part * SWAP_PAGES : (part + 1) * SWAP_PAGES]
        stacks = [np.concatenate([x[stack][own] for x in read], axis=1) for stack in read[0]]
        whole = np.concatenate(stacks)[self.base.cfg.order_of_routes(read[0])]  # [L, n, PAGE, X]
        found = whole.reshape(whole.shape[0], -1, whole.shape[-1])[:, :count].swapaxes(0, 1)
        if self._answered:
            self._visited[next(self._numbers)] = found
        return found

    def block_until_ready(self) -> None:
        """Waits until this process's devices have finished all calls so far."""
        jax.block_until_ready(self.pool)

    def drop(self) -> None:
        """Drops the pool and every swapped copy."""
        self.pool, self._swapped = None, {}

    def nowhere(self) -> np.ndarray:
        """Returns page numbers for one call, all out of range."""
        return self._ids(0, [], NOWHERE)[0]

    def _free(self) -> None:
        self.pool = None
        # A following rollout or update allocates other sizes, which the freed blocks do not fit.
        if self.base.mesh.devices.flat[0].platform == "cpu":
            host.give_back_freed_memory()

    def _read(self, pool: Any, part: int, pages: Sequence[int]) -> list[Any]:
        cfg, ids = self.base.cfg, self._ids(part, pages, 0)
        return [multihost.to_host(device.read_pages(pool, some, cfg=cfg)) for some in ids]

    def _ids(self, part: int, pages: Sequence[int], none: int) -> list[np.ndarray]:
        """Splits page numbers into calls of SWAP_PAGES over all parts, at least one call."""
        out = []
        for i in range(0, max(1, len(pages)), SWAP_PAGES):
            ids, some = np.full(self.parts * SWAP_PAGES, none, np.int32), pages[i : i + SWAP_PAGES]
            ids[part * SWAP_PAGES : part * SWAP_PAGES + len(some)] = some
            out.append(ids)
        return out

    # -- the other processes

    def follow(self) -> list[list[Completion]]:
        """Repeats the calls of process 0 until its call ends; returns the completions, if sent.
        Raises if the call failed in process 0, that process died, or it runs another engine.
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
                if is_user_error:
                    raise UserError(text)
                raise RuntimeError(f"process 0 failed: {text}")
            else:
                raise RuntimeError(
                    f"process 0 sent {word!r}, which this process does not know: run the same"
                    " version in every process"
                )


NUMBERS = {"tokens": np.int32, "logprobs": np.float64, "drawn_logprobs": np.float64}
PAIRS = ("top_logprobs", "top_prompt_logprobs", "prompt_alternatives")  # lists of lists of tuples
ROUTES = ("routes", "prompt_routes")


def _to_message(one: Completion, numbers: Mapping[int, int]) -> dict[str, Any]:
    """Replaces arrays of expert ids by their numbers, which ``numbers`` has by ``id``."""
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
