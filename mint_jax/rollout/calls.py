"""All that the engine asks of the devices: an empty pool, prefills, steps of decoding, pages to the
host and back.

What a call needs is numbers from the host, a plan or the numbers of pages, and it changes the pool
alone. So one process can decide for all: where there are several, process 0 has the schedule, the
requests and their streams, and tells the others each call before it makes it; they do as they are
told (``follow``) and know of no request. Residency's loads and writes into slots go the same way
(``residency.others``). What pages held stays with every process that read them, under a number, and
does not travel.

    begin       which engine calls, and whether the others want the answers
    make        an empty pool
    release     its memory
    prefill     a plan of blocks
    decode      a plan of rows, steps, and whether alternatives are wanted
    move        pages that are made of others' contents
    keep        pages to the host, under a number         restore     these into other pages
    forget      this number routes      the experts of some pages, under a number stage, write,
    abandon                                 residency's: an adapter to the device, a piece of it
    into its slot answers     the completions of ``generate`` end, fail   of the engine's call
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from mint_jax import host, messages, multihost
from mint_jax.errors import UserError
from mint_jax.lora.tree import Stacks
from mint_jax.models.base import Base
from mint_jax.models.paged import Teams
from mint_jax.rollout import answers, device
from mint_jax.rollout.device import Asked, Blocks, Drawn, Moves, Rows
from mint_jax.rollout.request import Completion
from mint_jax.rollout.sample import Penalties, SamplingParams

RECORDS = {
    record.__name__: record
    for record in (Asked, Blocks, Moves, Penalties, Rows, SamplingParams, Teams)
}
OURS = ("make", "release", "prefill", "decode", "move", "keep", "restore", "forget", "routes")


class Obeys(Protocol):
    """Another process's side of residency: see ``residency.others.Others``."""

    @property
    def stacks(self) -> Stacks: ...

    def obey(self, word: str, values: Sequence[Any]) -> None: ...


class Calls:
    """See the module.

    Args:
        facts: of the engine, equal in all processes.

    Attributes:
        pool: on the devices; None before it is made.
        stacks: the adapters' of the engine's call.
    """

    def __init__(self, base: Base, keep_routes: bool, facts: Sequence[Any]):
        self.base, self.keep_routes, self.facts = (
            base,
            keep_routes,
            [base.fingerprint, keep_routes, *facts],
        )
        self.pool: Any = None
        self.stacks: Stacks = {}
        self._kept: dict[int, list[Any]] = {}
        self._visited: dict[int, np.ndarray] = {}  # of this call, where the others want the answers
        self._numbers, self._open, self._answered = itertools.count(), False, False

    # -- of process 0

    def begin(self, answered: bool) -> None:
        """Begins a call of the engine.

        Args:
            answered: the others want the completions, ``answer``.
        """
        self._open, self._answered = True, answered and multihost.count() > 1
        messages.tell("begin", self.facts, self._answered)

    def answer(self, completions: Sequence[Sequence[Completion]]) -> None:
        """Gives the others the completions; the experts that they visited are there."""
        if self._answered:
            numbers = {id(array): number for number, array in self._visited.items()}
            messages.tell(
                "answers", [[answers.told(c, numbers) for c in group] for group in completions]
            )

    def end(self, error: BaseException | None = None) -> None:
        """Ends the call, once; with an error, in all processes."""
        self._visited = {}
        if not self._open:
            return
        self._open = False
        if error is None:
            messages.tell("end")
        else:
            # which is raised here; where process 0 cannot even say so, the others find that out
            # themselves
            with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):
                messages.tell(
                    "fail", isinstance(error, UserError), str(error) or type(error).__name__
                )

    def make(self, pages: int) -> None:
        """An empty pool of so many pages in each part."""
        self._all("make", pages)

    def release(self) -> None:
        """Gives the pool's memory back; the next that is asked for is ``make``."""
        self._all("release")

    def prefill(self, plan: Blocks) -> Any:
        """Writes blocks; what is asked of them, on the host."""
        return self._all("prefill", plan)

    def decode(self, plan: Rows, steps: int) -> Drawn:
        """What rows drew, on the host; without the alternatives, which nobody wants, where no row
        has ``top``.
        """
        return self._all("decode", plan, steps)

    def move(self, moves: Moves) -> None:
        """Makes pages of others' contents."""
        self._all("move", moves)

    def settle(self) -> None:
        """Waits until this process's devices have done what they were told."""
        jax.block_until_ready(self.pool)

    def keep(self, ids: Sequence[np.ndarray]) -> int:
        """The contents of pages on the host, in every process; the number under which they are."""
        number = next(self._numbers)
        self._all("keep", number, ids)
        return number

    def restore(self, number: int, ids: Sequence[np.ndarray], shift: int) -> None:
        """Puts what was kept into pages, ``shift`` places on from where it was read, and forgets
        it.
        """
        self._all("restore", number, ids, shift)

    def forget(self, number: int) -> None:
        """Forgets what was kept; after ``drop`` nothing is."""
        if number in self._kept:
            self._all("forget", number)

    def routes(self, ids: Sequence[np.ndarray], at: int, count: int) -> np.ndarray:
        """The experts of ``count`` tokens in pages, ``[count, L, X]``; a part's pages stand from
        ``at`` on.
        """
        return self._all("routes", next(self._numbers), ids, at, count)

    def _all(self, word: str, *values: Any) -> Any:
        messages.tell(word, *values)
        return getattr(self, f"_{word}")(*values)

    # -- of all processes

    def drop(self) -> None:
        """Forgets the pool and everything that was kept."""
        self.pool, self._kept = None, {}

    def _make(self, pages: int) -> None:
        self._release()
        self.pool = device.empty_pool(
            self.base.cfg, self.base.mesh, pages, self.base.dtype, self.keep_routes
        )

    def _release(self) -> None:
        self.pool = None
        # what runs next, a rollout or an update, takes other sizes
        if self.base.mesh.devices.flat[0].platform == "cpu":
            host.give_back_freed_memory()

    def _prefill(self, plan: Blocks) -> Any:
        self.pool, scores = device.prefill(
            self.base.params, self.stacks, self.pool, plan, cfg=self.base.cfg
        )
        return None if scores is None else multihost.to_host(tuple(scores))

    def _decode(self, plan: Rows, steps: int) -> Drawn:
        args = self.base.params, self.stacks, self.pool, plan, np.int32(steps)
        self.pool, drawn = device.decode(*args, cfg=self.base.cfg)
        if not plan.top.any():
            drawn = drawn._replace(top_ids=np.zeros(0), top_logprobs=np.zeros(0))
        return Drawn(*multihost.to_host(tuple(drawn)))

    def _move(self, moves: Moves) -> None:
        self.pool = device.move_pages(self.pool, moves, cfg=self.base.cfg)

    def _keep(self, number: int, ids: Sequence[np.ndarray]) -> None:
        self._kept[number] = [
            multihost.to_host(device.read_pages(self.pool, some, cfg=self.base.cfg)) for some in ids
        ]

    def _restore(self, number: int, ids: Sequence[np.ndarray], shift: int) -> None:
        for some, held in zip(ids, self._kept.pop(number), strict=True):
            if shift:
                held = jax.tree.map(lambda x: np.roll(x, shift, axis=1), held)
            self.pool = device.write_pages(self.pool, some, held, cfg=self.base.cfg)

    def _forget(self, number: int) -> None:
        del self._kept[number]

    def _routes(self, number: int, ids: Sequence[np.ndarray], at: int, count: int) -> np.ndarray:
        of, each = (
            {"routes": self.pool["moe"]["routes"]},
            len(ids[0]) // device.page_parts(self.base.cfg, self.base.mesh),
        )
        read = [multihost.to_host(device.read_pages(of, some, cfg=self.base.cfg)) for some in ids]
        # [L, n, PAGE, X]
        whole = np.concatenate([held["routes"][:, at : at + each] for held in read], axis=1)
        found = whole.reshape(whole.shape[0], -1, whole.shape[-1])[:, :count].swapaxes(0, 1)
        if self._answered:
            self._visited[number] = found
        return found

    # -- of the others

    def follow(self, residency: Obeys | None) -> list[list[Completion]]:
        """Does what process 0 tells, until its call ends; the completions, where that gives any.

        Raises:
            UserError, RuntimeError: the call failed in process 0, that process is gone, or it runs
                another engine.
        """
        found: list[list[Completion]] = []
        while True:
            word, values = messages.hear(RECORDS)
            if word in OURS:
                getattr(self, f"_{word}")(*values)
            elif word == "begin":
                facts, self._answered = values
                if facts != self.facts:
                    raise RuntimeError(
                        f"process 0 runs an engine of {facts}, this process one of {self.facts}:"
                        " their programs differ"
                    )
            elif word == "answers":
                found = [[answers.heard(c, self._visited) for c in group] for group in values[0]]
            elif word == "end":
                self._visited = {}
                return found
            elif word == "fail":
                mistake, text = values
                raise UserError(text) if mistake else RuntimeError(f"process 0 failed: {text}")
            elif residency is not None:
                residency.obey(word, values)
            else:
                raise RuntimeError(
                    f"process 0 loads adapters ({word}), and this process follows without"
                    " residency: give it to follow()"
                )
