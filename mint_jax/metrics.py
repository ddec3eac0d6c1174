"""What a run leaves to read: JSONL rows, TensorBoard scalars, progress lines with a rate and the time left.

Where several processes run, the first writes and prints; in the others the same calls do nothing.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from mint_jax import multihost


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and their numbers to TensorBoard.

    Args:
        directory: the run's workdir.
        tensorboard: also write event files under ``tensorboard/``.
    """

    def __init__(self, directory: str | Path, tensorboard: bool = True):
        self.path = Path(directory) / "metrics.jsonl"
        self._file = (self.path if multihost.is_main() else Path(os.devnull)).open("a", buffering=1)
        self._board = None
        if tensorboard and multihost.is_main():
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(Path(directory) / "tensorboard"), write_to_disk=True)

    def write(self, step: int, name: str, values: dict[str, Any]) -> None:
        """One row ``{"step", "name", ...values}``."""
        self._file.write(json.dumps({"step": step, "name": name, "time": round(time.time(), 3), **values}) + "\n")
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{name}/{key}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def truncate_rows(path: Path, keep: dict[str, int]) -> None:
    """Drops the rows of each name at or after ``keep[name]``: a resumed run writes those steps again."""
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
    staging = path.with_suffix(".tmp")
    staging.write_text("".join(row + "\n" for row in rows))
    staging.replace(path)


class Progress:
    """Prints ``[what] done/total, detail, elapsed, left`` at most every ``every`` seconds, and at the end."""

    def __init__(self, what: str, total: int, every: float = 2.0, out: TextIO | None = None, done: int = 0):
        self.what, self.total, self.every = what, total, every
        self.out = out or sys.stderr
        self._start = time.monotonic()
        self._first = done
        self._last = float("-inf")

    def update(self, done: int, detail: str = "") -> None:
        now = time.monotonic()
        if not multihost.is_main():
            return
        if done < self.total and now - self._last < self.every:
            return
        self._last = now
        elapsed = now - self._start
        moved = done - self._first
        left = elapsed / moved * (self.total - done) if moved > 0 else float("nan")
        eta = f", {clock(left)} left" if moved > 0 and done < self.total else ""
        print(f"[{self.what}] {done}/{self.total}{' ' + detail if detail else ''} ({clock(elapsed)}{eta})", file=self.out, flush=True)


def clock(seconds: float) -> str:
    """``75.2`` -> ``1:15``."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
