"""Snapshots of policies in training, from which a restart goes on.

A loaded checkpoint may be deleted later. Its file stays linked below ``loads/`` until a snapshot
includes it, because a restart without that snapshot loads it again.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from mint_jax import files
from mint_jax.catalog.records.database import DatabaseFailed
from mint_jax.digest import blake3_of
from mint_jax.errors import UserError
from mint_jax.service.futures import Futures, TrainingRequest
from mint_jax.train import host_state
from mint_jax.train.host_state import HostState

log = logging.getLogger("mint_jax.service")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A policy's state between two requests, and the place up to which it has everything."""

    model: str
    place: int
    state: HostState

    def write(self, folder: Path) -> None:
        """Replaces the policy's file durably."""
        data = self.state.to_bytes({"model": self.model, "place": self.place})
        files.write_file(path_of(folder, self.model), bytes.fromhex(blake3_of(data)) + data)

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Reads a file of ``write``. Raises ``UserError`` if it is damaged."""
        data = path.read_bytes()
        digest, data = data[:32].hex(), data[32:]
        if blake3_of(data) != digest:
            raise UserError(
                f"{path} is damaged: its digest is not {digest}; restore it, or delete it to give"
                " the policy up"
            )
        notes = host_state.notes_of(data)
        return cls(notes["model"], notes["place"], HostState.from_bytes(data, str(path)))


def path_of(folder: Path, model: str) -> Path:
    """Returns the path of a policy's snapshot."""
    return folder / f"{blake3_of(model.encode())[:32]}.safetensors"


@dataclasses.dataclass
class Unsnapshotted:
    """Changes of a policy since its last snapshot, the first ``at``; ``loads``: ids of requests."""

    at: float = dataclasses.field(default_factory=time.monotonic)
    count: int = 0
    loads: list[str] = dataclasses.field(default_factory=list)


class Snapshots:
    """The snapshots of a server's folder. A policy's next one is due after ``every`` changes, after
    ``every_s`` seconds, and after a load. All methods may be called from any thread.
    """

    def __init__(self, folder: Path, every: int, every_s: float):
        self.every, self.every_s = every, every_s
        self.states, self.loads = folder / "states", folder / "loads"
        self.loads.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._changes = collections.defaultdict[str, Unsnapshotted](Unsnapshotted)

    def read(self) -> list[Snapshot]:
        """Returns all snapshots. Raises ``UserError``: one is damaged."""
        return [Snapshot.read(path) for path in sorted(self.states.glob("*.safetensors"))]

    def due(self, request: TrainingRequest, is_load: bool) -> Unsnapshotted | None:
        """Counts a request that changed its policy. Returns the changes since the last snapshot if
        the next one is due.
        """
        with self._lock:
            changes = self._changes[request.model]
            changes.count += self.every if is_load else 1
            if is_load:
                changes.loads.append(request.id)
            overdue = time.monotonic() - changes.at >= self.every_s
            is_due = overdue or changes.count >= self.every
            return self._changes.pop(request.model) if is_due else None

    def write(
        self, request: TrainingRequest, state: HostState, changes: Unsnapshotted, futures: Futures
    ) -> None:
        """Writes the snapshot after a request. If the disk refuses, the older one stays, and the
        policy's next change tries again.
        """
        model = request.model
        try:
            place = futures.place(model)
            Snapshot(model, place, state).write(self.states)
            if request not in futures:  # its model was forgotten
                futures.place(model)  # by now the deletion is durable
                self.remove(model)
                return
            futures.snapshot(model, place)
            self.unlink(changes.loads)
        except (OSError, DatabaseFailed) as error:
            log.warning("the snapshot of %s is not written yet: %s", model, error)
            with self._lock:
                self._changes[model].count += self.every
                self._changes[model].loads += changes.loads

    def remove(self, model: str) -> None:
        """Deletes a policy's snapshot."""
        path_of(self.states, model).unlink(missing_ok=True)

    def forget(self, model: str) -> None:
        """Drops a policy's changes and the files that it loaded."""
        with self._lock:
            changes = self._changes.pop(model, Unsnapshotted())
        self.unlink(changes.loads)

    def unlink(self, ids: Iterable[str]) -> None:
        """Drops the files that these requests loaded."""
        for id in ids:
            for path in self.loads.glob(f"{id}-*"):
                path.unlink(missing_ok=True)
