"""The output of a batch job: each row on disk as it is done, the whole file when all are, and the
way on after an interruption.

Rows come in the order in which turns and groups end. They are appended to ``OUTPUT.part``, which
begins with what they are made from; a job that finds one goes on with the rows that it lacks.
``OUTPUT`` appears whole, in the order of the input, and the part goes.
"""

import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint_jax import interrupts, multihost
from mint_jax.data.sources import Row, json_line, write_rows
from mint_jax.errors import Interrupted, UserError


class Output:
    """The rows of one job; a context. Several processes hold the same rows, process 0 writes.

    Args:
        path: of the output.
        total: rows wanted.
        made_from: what decides the rows (input, base, settings), by the names that a user knows.

    Attributes:
        rows: what is done, by its index in the input.

    Raises:
        UserError: the folder cannot be written, another process writes there, or a part is there
            that was made from something else.
        Interrupted: leaving the context on Ctrl-C or SIGTERM; one line says how many rows are done
            and how to go on.
    """

    def __init__(self, path: Path, total: int, made_from: Mapping[str, Any]):
        self.path, self.part, self.total = path, path.with_name(path.name + ".part"), total
        self.rows: dict[int, Row] = {}
        self._made_from: dict[str, Any] = {}
        self._file: Any = None
        try:
            for entry in multihost.agree("rows that are done", self._open):
                if "row" in entry:
                    self.rows[entry["row"]] = entry["result"]
                else:
                    self._made_from |= entry["made_from"]
            self.begin(made_from)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise

    def __enter__(self) -> "Output":
        interrupts.standing(self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk has been reported
                self._file.close()
            if not self.rows:
                self.part.unlink(missing_ok=True)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"{str(error) or 'SIGINT'}; {self._done()}", getattr(error, "number", signal.SIGINT)
            ) from None

    def begin(self, made_from: Mapping[str, Any]) -> None:
        """Notes what the rows are made from, as far as it is known by now.

        Raises:
            UserError: rows are there that were made from something else.
        """
        mine = json.loads(json.dumps(made_from, default=str))
        for key, value in mine.items():
            if self.rows and (old := self._made_from.get(key, value)) != value:
                raise UserError(
                    f"{self.part} holds {len(self.rows)} of {self.total} rows of a run with {key}"
                    f" {old!r}, this one has {value!r}: repeat the former to go on with them,"
                    " remove that file to begin anew, or choose another output"
                )
        if new := {key: value for key, value in mine.items() if key not in self._made_from}:
            self._made_from |= new
            multihost.agree("output", lambda: self._append([{"made_from": new}]))

    def add(self, results: Mapping[int, Row]) -> None:
        """Appends rows that are done; they are on disk when this returns."""
        multihost.agree(
            "output",
            lambda: self._append([{"row": n, "result": row} for n, row in results.items()]),
        )
        self.rows |= results

    def finish(self) -> None:
        """Writes the whole output, and removes the part."""
        multihost.agree("output", self._finish)

    def _open(self) -> list[Row]:
        """The entries of a part that is there."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise IsADirectoryError("it is a folder")
            self._file = self.part.open("a+b")
            self._hold()
            self._file.seek(0)
            whole = self._file.read()
            lines = whole[: whole.rfind(b"\n") + 1].splitlines()
            self._file.truncate(whole.rfind(b"\n") + 1)  # the last one may be cut short
        except OSError as error:
            raise UserError(
                f"output {self.path} cannot be written ({error}): choose another path or free disk"
                " space"
            ) from None
        try:
            entries = [json.loads(line) for line in lines]
            if not all(("row" in e and "result" in e) or "made_from" in e for e in entries):
                raise ValueError("other entries")
        except (ValueError, TypeError):
            raise UserError(
                f"{self.part} is not what an interrupted job leaves: remove it, or choose another"
                " output"
            ) from None
        if not any("row" in entry for entry in entries):
            self._file.truncate(0)
            return []
        return entries

    def _hold(self) -> None:
        """Refuses an output that another process is writing: two would leave each other's rows in
        one part.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"output {self.path} is being written by another process: wait until it ends, or"
                " choose another"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _append(self, entries: list[Row]) -> None:
        try:
            self._file.write("".join(map(json_line, entries)).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(
                f"output {self.part} cannot be written ({error}): {self._done()}, once there is"
                " space"
            ) from None

    def _finish(self) -> None:
        write_rows(self.path, (self.rows[n] for n in range(self.total)))
        self.part.unlink(missing_ok=True)

    def _done(self) -> str:
        if not self.rows:
            return f"none of {self.total} rows is done; the same command begins anew"
        return (
            f"{len(self.rows)} of {self.total} rows are in {self.part}; the same command goes on"
            " with the others"
        )
