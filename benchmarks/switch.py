"""Promotion and rollback under concurrent reads: the time to move an alias, and stale reads.

One thread moves the alias ``serving`` of some policies in a catalog of 10^4 revisions, while
threads of this process and another process resolve them; the same moves run first without readers
(``quiet``). A read is stale if it shows a value that the alias had at no time between the last move
that ended before it started and the last move that started before it ended. ``decided`` counts
reads with one valid value.
"""

import functools
import multiprocessing
import os
import queue
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import timing
from benchmarks.alone import scratch
from benchmarks.catalog_fill import Plan, fill, open_catalog
from benchmarks.postgres_server import PostgresServer
from mint_jax.catalog.lifecycle import Catalog
from mint_jax.errors import UserError

ALIAS = "serving"
_FIELDS = 4  # of a read: policy, began, ended, number
READY_S = 120.0


class Move(NamedTuple):
    """One move of a policy's alias to a revision, in nanoseconds of the monotonic clock."""

    policy: int
    began: int
    ended: int
    number: int
    kind: str


def judge(moves: Sequence[Move], reads: np.ndarray, first: int) -> dict[str, int]:
    """Counts stale and decided reads, rows of policy, began, ended, number. ``first``: the number
    that every alias named before its first move.
    """
    stale = decided = 0
    for policy in np.unique(reads[:, 0]).tolist():
        own = [move for move in moves if move.policy == policy]
        began, ended = (
            np.array([getattr(move, name) for move in own], np.int64) for name in ("began", "ended")
        )
        numbers = np.array([first, *(move.number for move in own)])
        rows = reads[reads[:, 0] == policy]
        # moves that had returned: the newest of them is numbers[low]
        low = np.searchsorted(ended, rows[:, 1], side="right")
        high = np.searchsorted(began, rows[:, 2], side="left")  # moves that may have been seen
        one = low == high
        decided += int(one.sum())
        stale += int((numbers[low[one]] != rows[one, 3]).sum())
        for i in np.flatnonzero(~one):
            stale += int(rows[i, 3] not in numbers[low[i] : high[i] + 1])
    return {"stale_reads": stale, "decided": decided}


_Found = tuple[bytes, int]  # rows of ``_FIELDS`` int64, and the number of errors


def _read(
    catalog: Catalog, plan: Plan, policies: Sequence[int], seed: int, stop: Any, ready: Any
) -> _Found:
    """Resolves until stopped; returns reads of ``serving``."""
    rng = np.random.default_rng(seed)
    reads, errors = array("q"), 0
    while not stop.is_set():
        hot, other = (rng.integers(0, n, 256).tolist() for n in (len(policies), plan.policies))
        for k, policy in zip(hot, other, strict=True):
            try:
                began = time.monotonic_ns()
                found = catalog.resolve(f"{plan.policy(policies[k])}@{ALIAS}")
                ended = time.monotonic_ns()
                reads.extend((k, began, ended, found.number))
                catalog.resolve(f"{plan.policy(policy)}@latest")
            except UserError:
                errors += 1
            if stop.is_set():
                break
        ready.set()
    return reads.tobytes(), errors


def _read_elsewhere(
    where: tuple[str, str | None], plan: Plan, policies: Sequence[int], stop: Any, *ends: Any
) -> None:
    """``_read`` in a process of its own."""
    ready, answer = ends
    with open_catalog(Path(where[0]), where[1], actor="another process") as catalog:
        answer.send(_read(catalog, plan, policies, 1_000, stop, ready))


class _Writer:
    """Moves aliases, and knows what they must be."""

    def __init__(self, catalog: Catalog, plan: Plan, policies: Sequence[int], seed: int):
        self._catalog, self._plan, self._policies = catalog, plan, policies
        self._rng = np.random.default_rng(seed)
        self._stacks = [[1] for _ in policies]  # what a rollback goes back to lies under the last
        self.moves: list[Move] = []
        self.errors = 0
        for policy in policies:
            catalog.promote(plan.policy(policy), 1, ALIAS, why="start")

    def move(self, k: int) -> None:
        """One move of the k-th policy's alias."""
        stack, name = self._stacks[k], self._plan.policy(self._policies[k])
        back = len(stack) > 1 and self._rng.random() < 0.5
        if back:
            stack.pop()
            call = functools.partial(self._catalog.rollback, name, ALIAS)
        else:
            numbers = [n for n in range(1, self._plan.per_policy + 1) if n != stack[-1]]
            stack.append(int(self._rng.choice(numbers)))
            call = functools.partial(self._catalog.promote, name, stack[-1], ALIAS)
        began, found, ended = time.monotonic_ns(), call(), time.monotonic_ns()
        self.errors += found.number != stack[-1]
        self.moves.append(Move(k, began, ended, stack[-1], "rollback" if back else "promote"))

    def run(self, count: int, what: str) -> list[Move]:
        """``count`` moves, the policies in turn."""
        first = len(self.moves)
        for k in timing.counted(what, range(count)):
            self.move(k % len(self._policies))
        return self.moves[first:]


def _latency(moves: Sequence[Move]) -> dict[str, Any]:
    return {
        kind: timing.percentiles(
            [move.ended - move.began for move in moves if move.kind == kind], scale=1e-6
        )
        for kind in ("promote", "rollback")
    }


def measure(config: Any, folder: Path, database: str | None, what: str) -> dict[str, Any]:
    """Measures all on one database: a URL, or None for SQLite in the folder."""
    plan = Plan(config.entries, config.per_policy, config.batch, config.seed)
    filled = fill(folder, plan, database)
    rng = np.random.default_rng(config.seed)
    policies = rng.choice(plan.policies, config.policies, replace=False).tolist()
    spawn, found = multiprocessing.get_context("spawn"), queue.SimpleQueue[_Found]()
    stop, ready = spawn.Event(), [spawn.Event() for _ in range(config.threads + 1)]
    theirs, answer = spawn.Pipe(duplex=False)
    where = str(folder), database
    other = spawn.Process(
        target=_read_elsewhere, args=(where, plan, policies, stop, ready[-1], answer), daemon=True
    )
    with open_catalog(folder, database, actor="operator") as catalog:
        writer = _Writer(catalog, plan, policies, config.seed)
        quiet = writer.run(config.moves // 2, f"{what}: moves without readers")
        readers = [
            threading.Thread(
                target=lambda i=i: found.put(_read(catalog, plan, policies, i, stop, ready[i]))
            )
            for i in range(config.threads)
        ]
        try:
            for one in (other, *readers):
                one.start()
            answer.close()
            if not all(event.wait(READY_S) for event in ready):
                raise UserError(
                    f"no reader resolved {ALIAS!r} within {READY_S:.0f} s: look at what else this"
                    " machine does"
                )
            began = time.monotonic()
            busy = writer.run(config.moves, f"{what}: moves under traffic")
            seconds = time.monotonic() - began
        finally:
            stop.set()
            for one in readers:
                if one.ident is not None:
                    one.join()
        if not theirs.poll(READY_S):
            raise UserError("the other process that reads has ended without its results")
        all_found: list[_Found] = [theirs.recv(), *(found.get() for _ in readers)]
        other.join(READY_S)
        # the audit log knows each of them
        log, most = sum(move.policy == 0 for move in writer.moves), len(writer.moves) + 2
        kept = len(catalog.audit(plan.policy(policies[0]), alias=ALIAS, limit=most)) - 1
    reads = [np.frombuffer(one, np.int64).reshape(-1, _FIELDS) for one, _ in all_found]
    both = np.concatenate(reads)
    during = both[both[:, 1] >= busy[0].began]
    errors = sum(count for _, count in all_found) + writer.errors + abs(log - kept)
    return {
        "entries": plan.entries,
        "policies": config.policies,
        "moves": len(busy),
        **_latency(busy),
        "quiet": _latency(quiet),
        "moves_per_s": round(len(busy) / seconds, 1),
        "reads": len(both),
        "reads_elsewhere": len(reads[0]),
        "reads_per_s": round(2 * len(during) / seconds),
        **judge(writer.moves, both, 1),
        "errors": errors,
        "fill_entries_per_s": filled["entries_per_s"],
    }


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Runs the bench; returns its report. What it makes is removed."""
    report: dict[str, Any] = {"cores": os.cpu_count(), "threads": config.threads, "postgres": None}

    def on(what: str, database: str | None = None) -> dict[str, Any]:
        with scratch(workdir / "switch") as folder:
            began = os.getloadavg()[0]
            found = measure(config, folder, database, what)
        return found | {"load_average": [round(began, 1), round(os.getloadavg()[0], 1)]}

    both = [on("SQLite")]
    report["sqlite"] = both[0]
    try:
        server = PostgresServer() if config.postgres else None
    except RuntimeError as error:
        server, report["postgres_missing"] = None, str(error)
    if server is not None:
        try:
            report["postgres"] = on("PostgreSQL", server.url)
        finally:
            server.stop()
        both.append(report["postgres"])
    return report | {
        key: sum(row[key] for row in both) for key in ("reads", "stale_reads", "errors")
    }
