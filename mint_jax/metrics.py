"""Metrics of a run: JSONL rows, TensorBoard scalars, and progress lines with the time left.

With several processes only the first writes and prints.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.files import write_file

KEPT = 64  # number of last updates that estimate the time left


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and their numbers to event files under ``tensorboard/``.
    Raises ``UserError``: a file cannot be written, here or in ``write``.
    """

    def __init__(self, directory: str | Path, tensorboard: bool = True):
        self.path = Path(directory) / "metrics.jsonl"
        self._file = self._board = None
        self._failed = False
        if not multihost.is_main():
            return
        with self._explained(self.path):
            self._file = self.path.open("ab", buffering=0)
        if tensorboard:
            from tensorboardX.event_file_writer import EventsWriter

            # In the calling thread: ``SummaryWriter`` writes in a thread of its own, and if a full
            # disk kills that, the eleventh later call blocks.
            folder = Path(directory) / "tensorboard"
            with self._explained(folder):
                folder.mkdir(exist_ok=True)
                self._board = EventsWriter(str(folder / "events"))

    def write(self, step: int, name: str, values: dict[str, Any]) -> None:
        """Writes one row ``{"step", "name", ...values}``."""
        if self._file is None:
            return
        row = {"step": step, "name": name, "time": round(time.time(), 3), **values}
        line = f"{json.dumps(row)}\n".encode()
        with self._explained(self.path):
            while line:  # a nearly full disk takes a part
                line = line[self._file.write(line) :]
        if self._board is not None:
            from tensorboardX.proto import event_pb2
            from tensorboardX.summary import scalar

            with self._explained(self.path.parent / "tensorboard"):
                for key, value in values.items():
                    if isinstance(value, int | float):
                        found: Any = scalar(f"{name}/{key}", value)
                        now = time.time()
                        event = event_pb2.Event(wall_time=now, step=step, summary=found)  # type: ignore[attr-defined]
                        self._board.write_event(event)
                self._board.flush()

    @contextlib.contextmanager
    def _explained(self, path: Path) -> Iterator[None]:
        """Turns a file-system error into a ``UserError``."""
        try:
            yield
        except OSError as error:
            self._failed = True
            raise UserError(
                f"{path} cannot be written ({error.strerror or error}): free or allow the space,"
                " and start the same command again, which resumes; --config.tensorboard=false"
                " writes no event files"
            ) from None

    def close(self) -> None:
        """Closes the files, once."""
        files, self._file, self._board = (self._file, self._board), None, None
        reported = contextlib.suppress(UserError) if self._failed else contextlib.nullcontext()
        for file in files:
            if file is not None:
                with reported, self._explained(self.path.parent):
                    file.close()


def truncate_rows(path: Path, keep: dict[str, int]) -> None:
    """Drops the rows of each name at or after step ``keep[name]``."""
    if not path.is_file():
        return
    rows = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # a crash may cut the last line short
        if row["step"] < keep.get(row["name"], 0):
            rows.append(line)
    write_file(path, "".join(row + "\n" for row in rows))


class Progress:
    """Prints ``[what] done/total unit detail (elapsed, left)`` at most every ``every`` seconds, and
    at the end.

    Args:
        done: pieces done earlier.
        per: pieces per displayed unit: 3 for steps of three policies, 1e6 for bytes shown as MB.
    """

    def __init__(
        self,
        what: str,
        total: int,
        every: float = 2.0,
        out: TextIO | None = None,
        done: int = 0,
        per: float = 1,
        unit: str = "",
    ):
        self.what, self.total, self.every, self.per, self.unit = what, total, every, per, unit
        self.out = out or sys.stderr
        self._start = time.monotonic()
        self._last = float("-inf")
        self._at = (0.0, done)  # seconds and pieces of the last update
        self._paces: list[tuple[float, int]] = []  # seconds a piece and pieces, but of the first
        self._started = False

    def update(self, done: int, detail: str = "") -> None:
        """Prints the progress, unless it was printed just before."""
        now = time.monotonic()
        if not multihost.is_main():
            return
        elapsed = now - self._start
        self._note(elapsed, done)
        if done < self.total and now - self._last < self.every:
            return
        self._last = now
        eta = ""
        if self._paces and done < self.total:
            eta = f", {clock(self._pace() * (self.total - done))} left"
        total = math.ceil(self.total / self.per)
        shown = f"{total if done >= self.total else int(done // self.per)}/{total}"
        words = " ".join(word for word in (shown, self.unit, detail) if word)
        print(f"[{self.what}] {words} ({clock(elapsed)}{eta})", file=self.out, flush=True)

    def _note(self, elapsed: float, done: int) -> None:
        """Records the pace since the last update, except the first, which includes compilation."""
        before, pieces = self._at[0], done - self._at[1]
        if pieces > 0:
            if self._started:
                self._paces.append(((elapsed - before) / pieces, pieces))
                del self._paces[:-KEPT]
            self._at, self._started = (elapsed, done), True

    def _pace(self) -> float:
        """Returns seconds per piece: the median, so that steps that compiled do not count."""
        half = sum(pieces for _, pieces in self._paces) / 2
        for pace, pieces in sorted(self._paces):
            half -= pieces
            if half <= 0:
                return pace
        return 0.0


def clock(seconds: float) -> str:
    """Formats seconds: ``75.2`` -> ``1:15``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
