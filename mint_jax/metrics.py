"""What a run leaves to read: JSONL rows, TensorBoard scalars, progress lines with a rate and the
time left.

Where several processes run, the first writes and prints; in the others the same calls do nothing.
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

KEPT = 64  # last updates that the time left goes by


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and their numbers to TensorBoard, both at once and in the
    calling thread.

    tensorboardX's own ``SummaryWriter`` writes in a thread; when that dies of a full disk, with a
    traceback, the eleventh call after it waits for ever.

    Args:
        directory: the run's workdir.
        tensorboard: also write event files under ``tensorboard/``.

    Raises:
        UserError: a file cannot be written, here or in ``write``.
    """

    def __init__(self, directory: str | Path, tensorboard: bool = True):
        self.path = Path(directory) / "metrics.jsonl"
        self._file = self._board = None
        self._failed = False
        if not multihost.is_main():
            return
        with self._told(self.path):
            self._file = self.path.open("ab", buffering=0)
        if tensorboard:
            from tensorboardX.event_file_writer import EventsWriter

            folder = Path(directory) / "tensorboard"
            with self._told(folder):
                folder.mkdir(exist_ok=True)
                self._board = EventsWriter(str(folder / "events"))

    def write(self, step: int, name: str, values: dict[str, Any]) -> None:
        """One row ``{"step", "name", ...values}``."""
        if self._file is None:
            return
        line = (
            json.dumps(
                {"step": step, "name": name, "time": round(time.time(), 3), **values}
            ).encode()
            + b"\n"
        )
        with self._told(self.path):
            while line:  # a disk that is nearly full takes a part
                line = line[self._file.write(line) :]
        if self._board is not None:
            from tensorboardX.proto import event_pb2
            from tensorboardX.summary import scalar

            numbers = {
                key: value for key, value in values.items() if isinstance(value, int | float)
            }
            with self._told(self.path.parent / "tensorboard"):
                for key, value in numbers.items():
                    event = event_pb2.Event(  # type: ignore[arg-type]
                        wall_time=time.time(), step=step, summary=scalar(f"{name}/{key}", value)
                    )
                    self._board.write_event(event)
                self._board.flush()

    @contextlib.contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        """Turns an error of the file system into a line."""
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
        """What was written is in the files. A second time, as when an interruption meets the end of
        a run, it does nothing.
        """
        files, self._file, self._board = (self._file, self._board), None, None
        for file in files:
            if file is not None:
                try:
                    file.close()
                except OSError as error:  # what a full disk did not take has been reported
                    if not self._failed:
                        raise UserError(
                            f"{self.path.parent} cannot be written ({error.strerror or error})"
                        ) from None


def truncate_rows(path: Path, keep: dict[str, int]) -> None:
    """Drops the rows of each name at or after ``keep[name]``: a resumed run writes those steps
    again.
    """
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
        total: all there is to do, in pieces.
        done: pieces that were done before.
        per: pieces of one that is shown: 3 for steps that three policies take, 1e6 for bytes shown
            as MB. The time left goes by pieces, and is not known before the second update.
        unit: what those are, in words.
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
        # seconds a piece and pieces, of each update but the first
        self._paces: list[tuple[float, int]] = []
        self._begun = False

    def update(self, done: int, detail: str = "") -> None:
        """Says how far it is, unless it has just been said."""
        now = time.monotonic()
        if not multihost.is_main():
            return
        elapsed = now - self._start
        self._note(elapsed, done)
        if done < self.total and now - self._last < self.every:
            return
        self._last = now
        eta = (
            f", {clock(self._pace() * (self.total - done))} left"
            if self._paces and done < self.total
            else ""
        )
        total = math.ceil(self.total / self.per)
        shown = f"{total if done >= self.total else int(done // self.per)}/{total}"
        words = " ".join(word for word in (shown, self.unit, detail) if word)
        print(f"[{self.what}] {words} ({clock(elapsed)}{eta})", file=self.out, flush=True)

    def _note(self, elapsed: float, done: int) -> None:
        """Keeps the pace since the last update. The first one is not kept: its programs were
        compiled on the way.
        """
        before, pieces = self._at[0], done - self._at[1]
        if pieces > 0:
            if self._begun:
                self._paces.append(((elapsed - before) / pieces, pieces))
                del self._paces[:-KEPT]
            self._at, self._begun = (elapsed, done), True

    def _pace(self) -> float:
        """Seconds a piece, the median over the pieces: steps that compiled something do not
        count.
        """
        half = sum(pieces for _, pieces in self._paces) / 2
        for pace, pieces in sorted(self._paces):
            half -= pieces
            if half <= 0:
                return pace
        return 0.0


def clock(seconds: float) -> str:
    """``75.2`` -> ``1:15``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
