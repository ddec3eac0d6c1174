"""Recipes from JSONL to JSONL: rows of any number of adapters, in turns of those that fit.

Each row is on disk as soon as it is done. Rows are appended to ``OUTPUT.part``, whose first line
has what they are made from; the same command continues an interrupted run. At the end ``OUTPUT``
appears as a whole, in the order of the input, and the part is removed.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mint_jax import fields, interrupts, multihost
from mint_jax.catalog.packed import digest_of
from mint_jax.data.sources import Row, json_line, numbered_rows, write_rows
from mint_jax.errors import Interrupted, UserError
from mint_jax.harness import start, workdir
from mint_jax.harness.adapters import AdapterSource, catalog_of
from mint_jax.harness.options import BatchSettings
from mint_jax.lora.tree import Slot, Stacks
from mint_jax.metrics import Progress
from mint_jax.models.base import Base
from mint_jax.residency.pool import AdapterBatch, Pool

Finished = Callable[[dict[int, Any]], None]  # results by index, as soon as they are there


class Program(NamedTuple):
    """The work of a recipe on its rows, whose names are among ``keys``; ``unit`` is of progress
    lines. Digests are None for the bare base.
    """

    unit: str
    keys: Sequence[str]
    prepare: Callable[[Row, str], Any]  # row, its place for errors -> checked input
    # inputs of a turn, slot and digest of each one's adapter, stacks -> results
    compute: Callable[
        [list[Any], list[Slot | None], list[str | None], Stacks, Finished], Sequence[Any]
    ]
    to_row: Callable[[Any, Any, str | None], Row]  # input, result, digest -> output without id


def run(
    config: BatchSettings,
    folder: Path,
    program_of: Callable[[Base], Program],
    made_from: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Row], list[Any], float]:
    """Runs a program over the rows of ``config.input``. ``made_from`` has further settings that
    decide the results, for resuming. Returns the common part of the recipe's result, all output
    rows, the results computed now, and seconds.
    """
    workdir.save_config(config, folder)
    places, rows = zip(*numbered_rows(config.input))
    decides = {"input with digest": digest_of(json.dumps(rows, sort_keys=True).encode())[:12]}
    decides |= {name: getattr(config, name) for name in ("base", "dtype", "quantise")}
    with Output(Path(config.output), len(rows)) as output:
        base = start.open_base(config)
        program, inputs = program_of(base), []
        for row, where in zip(rows, places):
            _check_row(row, program.keys, where)
            inputs.append(program.prepare(row, where))
        todo = [n for n in range(len(rows)) if n not in output.rows]
        names = [rows[n].get("adapter") for n in todo]

        def compute(turn: AdapterBatch) -> Sequence[Any]:
            numbers = [todo[i] for i in turn.rows]
            digests = [pool.digests.get(names[i] or "") for i in turn.rows]

            def done(results: dict[int, Any]) -> None:
                made = {}
                for i, result in results.items():
                    n = numbers[i]
                    row = program.to_row(inputs[n], result, digests[i])
                    made[n] = {"id": rows[n].get("id", n), **row}
                output.add(made)
                progress.update(len(output.rows), program.unit)

            slots = [turn.slot(names[i]) for i in turn.rows]
            return program.compute([inputs[n] for n in numbers], slots, digests, turn.stacks, done)

        with (
            catalog_of(config) as catalog,
            Pool(base, AdapterSource(base, catalog), names, config.slots, start.say) as pool,
        ):
            by_name = {f"adapter {name}": digest for name, digest in pool.digests.items()}
            output.begin(decides | {"base's fingerprint": base.fingerprint, **made_from, **by_name})
            progress = Progress(config.job, len(rows), done=len(output.rows))
            began = time.monotonic()
            results = pool.run(compute)
            seconds = time.monotonic() - began
        output.finish()
    common = {
        "adapters": len({row.get("adapter") for row in rows} - {None, ""}),
        "resumed": len(rows) - len(todo),
        "output": config.output,
    }
    return common, [output.rows[n] for n in range(len(rows))], results, seconds


def _check_row(row: Row, keys: Sequence[str], where: str) -> None:
    """Refuses a row with unknown keys, or with an ``adapter`` that is no text."""
    if strange := [key for key in row if key not in keys]:
        raise fields.unknown(f"{where}: a line has no", strange[0], keys)
    if not isinstance(name := row.get("adapter"), str | None):
        raise UserError(
            f"{where}: adapter is {name!r}; expected a PEFT directory or a revision's name, or null"
            " for the bare base"
        )


def tokens_of(base: Base, row: Row, where: str) -> list[int]:
    """Returns the token ids of a row with ``tokens``, ``text`` or ``prompt``."""
    if "tokens" in row:
        tokens = row["tokens"]
        if not isinstance(tokens, list) or not all(type(t) is int for t in tokens):
            raise UserError(f"{where}: tokens is {str(tokens)[:80]}; expected a list of token ids")
        return tokens
    for name in ("text", "prompt"):
        if name in row:
            if not isinstance(row[name], str):
                raise UserError(f"{where}: {name} is {str(row[name])[:80]}; expected a string")
            return base.need_tokenizer().encode(row[name])
    raise UserError(f"{where} has {', '.join(row) or 'nothing'}; expected tokens or text")


class Output:
    """Rows of one run by their index in the input; of several processes the first writes. Raises
    ``UserError`` if the output cannot be written, another process writes it, or the part is not
    what an interrupted run leaves. A context manager: an interruption says how many rows are done.
    """

    def __init__(self, path: Path, total: int):
        self.path, self.part, self.total = path, path.with_name(path.name + ".part"), total
        with contextlib.ExitStack() as on_error:
            self._closing = on_error
            head, *entries = multihost.agree("rows that are done", self._open) or [{}]
            self._closing = on_error.pop_all()
        self._made_from: dict[str, Any] = head
        self.rows: dict[int, Row] = {entry["row"]: entry["result"] for entry in entries}

    def __enter__(self) -> "Output":
        interrupts.standing(self._state)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported before
            self._closing.close()
        if not self.rows and multihost.is_main():
            self.part.unlink(missing_ok=True)
        if isinstance(error, KeyboardInterrupt):
            number = getattr(error, "number", signal.SIGINT)
            raise Interrupted(f"{str(error) or 'SIGINT'}; {self._state()}", number) from None

    def begin(self, made_from: Mapping[str, Any]) -> None:
        """Records what rows are made from, or refuses rows that were made from something else."""
        given = json.loads(json.dumps(made_from, default=str))
        for key, value in given.items():
            if self.rows and (old := self._made_from.get(key)) not in (value, None):
                raise UserError(
                    f"{self.part} holds {len(self.rows)} of {self.total} rows of a run with {key}"
                    f" {old!r}, this one has {value!r}: repeat the former to continue them, remove"
                    " that file to start again, or choose another output"
                )
        if not self.rows:
            self._append([given])

    def add(self, results: Mapping[int, Row]) -> None:
        """Appends finished rows; they are on disk when this returns."""
        self._append([{"row": n, "result": row} for n, row in results.items()])
        self.rows |= results

    def finish(self) -> None:
        """Writes the whole output and removes the part."""

        def write() -> None:
            write_rows(self.path, (self.rows[n] for n in range(self.total)))
            self.part.unlink(missing_ok=True)

        multihost.agree("output", write)

    def _open(self) -> list[Row]:
        """Locks the part; returns its entries where it has finished rows."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_dir():
                raise IsADirectoryError("it is a folder")
            self._file = self._closing.enter_context(self.part.open("a+b"))
            workdir.lock(
                self._file.fileno(),
                lambda: (
                    f"output {self.path} is being written by another process: wait until it ends,"
                    " or choose another"
                ),
            )
            self._file.seek(0)
            whole = self._file.read()
            self._file.truncate(whole.rfind(b"\n") + 1)  # the last line may be cut short
        except OSError as error:
            raise UserError(
                f"output {self.path} cannot be written ({error}): choose another path or free disk"
                " space"
            ) from None
        try:
            entries = [json.loads(line) for line in whole.splitlines()[: whole.count(b"\n")]]
            if not all("row" in e and "result" in e for e in entries[1:]):
                raise ValueError("other entries")
        except (ValueError, TypeError):
            raise UserError(
                f"{self.part} is not what an interrupted job leaves: remove it, or choose another"
                " output"
            ) from None
        if len(entries) < 2:
            self._file.truncate(0)
            return []
        return entries

    def _append(self, entries: list[Row]) -> None:
        def write() -> None:
            try:
                self._file.write("".join(map(json_line, entries)).encode())
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise UserError(
                    f"output {self.part} cannot be written ({error}): {self._state()}, once there"
                    " is space"
                ) from None

        multihost.agree("output", write)

    def _state(self) -> str:
        if not self.rows:
            return f"none of {self.total} rows is done; the same command starts again"
        return (
            f"{len(self.rows)} of {self.total} rows are in {self.part}; the same command goes on"
            " with the others"
        )
