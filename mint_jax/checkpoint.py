"""Training checkpoints through Orbax: asynchronous, atomic, the last few kept.

A checkpoint has a tree of arrays, further trees that restore alone, and one JSON value, committed
together. A crash at any moment leaves the earlier checkpoints intact. Digests of the files are
committed with them, and a changed file is never restored. Several processes make the same calls in
the same order on one shared folder; each writes its own shards.
"""

import asyncio
import errno
import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import absl.logging
import jax
import orbax.checkpoint as ocp

from mint_jax import multihost
from mint_jax.errors import UserError

FOLDER = "checkpoints"  # folder in a workdir
# file of a checkpoint: its own digest, then {path: [bytes, SHA-256]} of every other file
DIGESTS = "digests.json"
COMMITTED = "commit_success.txt"  # Orbax's marker, written last


class _WithDigests(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Temporary checkpoint folder that gets ``DIGESTS`` before its final name."""

    async def finalize(self) -> None:
        if _step_of(self.get_final()) is not None:  # not an item's folder
            # metadata written later would change the files
            store, self._checkpoint_metadata_store = self._checkpoint_metadata_store, None
            if store is not None:
                await asyncio.to_thread(store.wait_until_finished)
            await asyncio.to_thread(_write_digests, Path(self.get()))
        await super().finalize()


def _step_of(folder: Any) -> int | None:
    found = re.fullmatch(r"step_(\d+)", folder.name)
    return int(found[1]) if found else None


def _write_digests(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    text = json.dumps(
        {path.relative_to(folder).as_posix(): _digest(path) for path in files}, indent=0
    )
    (folder / DIGESTS).write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def _digest(path: Path) -> list[Any]:
    """Returns size in bytes and SHA-256."""
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _damage(folder: Path) -> str:
    """Describes the first damaged file of a checkpoint; empty if all files are intact."""
    for name in (DIGESTS, COMMITTED):
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
    own, _, text = (folder / DIGESTS).read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != own:
        return f"{folder / DIGESTS} has changed since it was written"
    for name, (size, digest) in json.loads(text).items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        found = _digest(path)
        if found[0] != size:
            return f"{path} has {found[0]} bytes, {size} were written"
        if found[1] != digest:
            return f"{path} has changed since it was written"
    return ""


class Checkpoints:
    """Numbered checkpoints of one run, of which the newest ``keep`` stay. ``on_commit`` is called
    in the caller's thread with each step that is durable.
    """

    def __init__(
        self, directory: str | Path, keep: int = 2, on_commit: Callable[[int], None] | None = None
    ):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=True,
            create=True,
            step_prefix="step",
            cleanup_tmp_directories=True,
            temporary_path_class=_WithDigests,
            # Background creation waits on a counter of the process, which another Orbax save
            # advances.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
            logger.addFilter(_is_not_raised_by_wait)
        if not isinstance(sys.unraisablehook, _DropClosedLoop):
            sys.unraisablehook = _DropClosedLoop(sys.unraisablehook)
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._on_commit = on_commit
        self._pending: int | None = None
        self._checked: set[int] = set()

    def save(
        self, step: int, arrays: Any, extra: Any, items: Mapping[str, Any] | None = None
    ) -> None:
        """Starts saving after the previous save; returns once the arrays are copied off the
        devices. Raises ``UserError``: the disk is full or not writable. ``items``: further trees by
        name, which ``orbax.checkpoint.StandardCheckpointer`` restores from ``step_9/NAME``.
        """
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(
                f"step {step} is not newer than {latest}, the latest in {self.directory}"
            )
        further = {name: ocp.args.StandardSave(tree) for name, tree in (items or {}).items()}
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave(extra), **further
        )
        try:
            self._manager.save(step, args=args)
        except OSError as error:
            raise self._explain(error) from None
        self._pending = step

    def wait(self) -> None:
        """Waits until nothing is in flight. Raises ``UserError``: the save failed; earlier
        checkpoints stay valid.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._pending = None
            raise self._explain(error) from error
        if self._pending is not None and self._on_commit is not None:
            self._on_commit(self._pending)
        self._pending = None

    def _explain(self, error: Exception) -> UserError:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(error) or "RESOURCE_EXHAUSTED" in str(error):
            reason = "no space left on the disk"
            remedy = "free disk space or set --workdir to a larger disk"
        else:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = "check that the folder is writable"
        last = self._newest()
        kept = f"step {last} is the last valid checkpoint"
        return UserError(
            f"saving a checkpoint in {self.directory} failed ({reason}): {remedy}, then start again"
            f" with the same command; {kept if last is not None else 'no checkpoint is there yet'}"
        )

    def latest(self) -> int | None:
        """Returns the newest step in process 0's view of the folder, unchecked; None without."""
        return multihost.agree("newest checkpoint", self._newest)

    def _newest(self) -> int | None:
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        """Returns the steps of all folders with a final name: the complete checkpoints."""
        folders = (path for path in self.directory.iterdir() if path.is_dir())
        return [step for folder in folders if (step := _step_of(folder)) is not None]

    def _check(self, step: int) -> None:
        """Checks on process 0 that every file of a checkpoint is unchanged."""

        def look() -> None:
            folder = self.directory / f"step_{step}"
            if not folder.is_dir():
                raise UserError(
                    f"checkpoint {step} is not in {self.directory}; it has"
                    f" {sorted(self._steps()) or 'none'}"
                )
            if not (damage := _damage(folder)):
                return
            older = sorted((s for s in self._steps() if s < step), reverse=True)
            whole = next((s for s in older if not _damage(self.directory / f"step_{s}")), None)
            remedy = f"remove {self.directory} to start over; no older checkpoint is whole"
            if whole is not None:
                remedy = (
                    f"remove {folder} and start again with the same command to resume from step"
                    f" {whole}"
                )
            raise UserError(
                f"checkpoint {step} is damaged: {damage}: restore it from a copy, or {remedy}"
            )

        if step == self._pending:
            self.wait()
        if step not in self._checked:
            multihost.agree("files of a checkpoint", look)
            self._checked.add(step)

    def restore(self, arrays: Any, step: int | None = None) -> tuple[int, Any, Any]:
        """Returns step, arrays (with the shapes and shardings of ``arrays``) and JSON value of a
        checkpoint, the newest by default. Raises ``UserError``: there is no checkpoint, its shapes
        differ, or a file is damaged.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise UserError(f"{self.directory} has no checkpoint to resume from")
        restored = self._restore(step, arrays=_like(arrays), extra=ocp.args.JsonRestore())
        return step, restored["arrays"], restored["extra"]

    def restore_item(self, step: int, item: str, arrays: Any) -> Any:
        """Restores one further tree of a checkpoint; arguments and errors as in ``restore``."""
        return self._restore(step, **{item: _like(arrays)})[item]

    def _restore(self, step: int, **items: Any) -> Any:
        self._check(step)
        args = ocp.args.Composite(**items)
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:
            raise UserError(
                f"checkpoint {step} in {self.directory} does not fit this config"
                f" ({str(error).splitlines()[0]}): resume with the config saved in its workdir, or"
                " choose another --workdir"
            ) from None

    def close(self) -> None:
        """Waits for the last save and closes the manager."""
        self.wait()
        self._manager.close()


def _like(arrays: Any) -> Any:
    return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays))


class _DropClosedLoop:
    """Unraisable-exception hook that drops late writes of a failed save; ``wait`` raises it."""

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not isinstance(error, RuntimeError) or str(error) != "Event loop is closed":
            self._hook(unraisable)


def _is_not_raised_by_wait(record: logging.LogRecord) -> bool:
    """Filters out log records of errors in Orbax threads and tasks, one stack trace per array."""
    # asyncio names the abandoned task in the message
    where = record.pathname if record.name != "asyncio" else record.getMessage()
    return record.levelno < logging.ERROR or "/orbax/checkpoint/" not in where
