"""Training checkpoints through Orbax: asynchronous, atomic, the last few kept.

A checkpoint is a tree of arrays, further trees that each restore alone, and one JSON value,
committed together. ``save`` returns once the arrays are copied off the devices; ``wait`` returns
once everything is on disk. A crash at any moment leaves the checkpoints committed before. With the
files their digests are committed, and nothing is restored from a file that has changed.

Where several processes run, all make the same calls in the same order, on one shared folder; each
writes its own shards.
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

FOLDER = "checkpoints"  # of a run, in its workdir
# of a checkpoint: its own digest, then {path: [bytes, SHA-256]} of every other file
DIGESTS = "digests.json"
COMMITTED = "commit_success.txt"  # Orbax's mark, written last


class _WithDigests(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A checkpoint's folder that gets ``DIGESTS`` before it gets its final name: no crash leaves
    one without the other.
    """

    async def finalize(self) -> None:
        if _step_of(self.get_final()) is not None:  # not an item's folder within
            # or files would change after
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
    """Size and SHA-256."""
    with open(path, "rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _damage(folder: Path) -> str:
    """The first file of a checkpoint that is not what was saved, and how; empty where all are."""
    for name in (DIGESTS, COMMITTED):
        if not (folder / name).is_file():
            return _how(folder / name)
    own, _, text = (folder / DIGESTS).read_bytes().partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != own:
        return f"{folder / DIGESTS} has changed since it was written"
    for name, (size, digest) in json.loads(text).items():
        path = folder / name
        if not path.is_file():
            return _how(path)
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
        if _digest(path)[1] != digest:
            return f"{path} has changed since it was written"
    return ""


def _how(path: Path) -> str:
    return f"{path} is {'no file' if path.exists() else 'missing'}"


class Checkpoints:
    """Numbered checkpoints of one run.

    Args:
        directory: their folder.
        keep: how many of the newest to keep.
        on_commit: called in the caller's thread with the step, once that step is durable.
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
            # Created in the background, they are awaited by a counter of the process, which a
            # revision saved meanwhile moves on.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        for logger in (absl.logging.get_absl_logger(), logging.getLogger("asyncio")):
            logger.addFilter(_told_by_wait)
        if not isinstance(sys.unraisablehook, _Others):
            sys.unraisablehook = _Others(sys.unraisablehook)
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._on_commit = on_commit
        self._pending: int | None = None
        self._checked: set[int] = set()

    def save(
        self, step: int, arrays: Any, extra: Any, items: Mapping[str, Any] | None = None
    ) -> None:
        """Starts saving. The save before it is waited for, so at most one is in flight.

        Args:
            items: further trees by name;
                ``orbax.checkpoint.StandardCheckpointer().restore(directory / "step_9" / name)``
                gives one of them to any program.

        Raises:
            UserError: the disk is full or not writable; the checkpoints before stay valid.
        """
        self.wait()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(
                f"step {step} is not newer than {latest}, which is saved in {self.directory}"
            )
        beside = {name: ocp.args.StandardSave(tree) for name, tree in (items or {}).items()}
        args = ocp.args.Composite(
            arrays=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave(extra), **beside
        )
        try:
            self._manager.save(step, args=args)
        except OSError as error:
            raise self._explain(error) from None
        self._pending = step

    def wait(self) -> None:
        """Returns when nothing is in flight; reports the step that became durable.

        Raises:
            UserError: the save failed; the checkpoints before stay valid.
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
        full = (
            getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            or "No space left" in str(error)
            or "RESOURCE_EXHAUSTED" in str(error)
        )
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = "no space left on the disk" if full else first
        remedy = (
            "free disk space or set --workdir to a larger disk"
            if full
            else "check that the folder is writable"
        )
        last = self._newest()
        kept = (
            f"step {last} is the last valid checkpoint"
            if last is not None
            else "no checkpoint was written yet"
        )
        return UserError(
            f"saving a checkpoint in {self.directory} failed ({reason}): {remedy}, then start again"
            f" with the same command; {kept}"
        )

    def latest(self) -> int | None:
        """The newest step, or None: what process 0 sees of the folder. Whether its files are whole
        ``restore`` finds out.
        """
        return multihost.agree("newest checkpoint", self._newest)

    def _newest(self) -> int | None:
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        """Of all folders with a checkpoint's final name, which Orbax gives to whole ones alone."""
        return [
            step
            for path in self.directory.iterdir()
            if path.is_dir() and (step := _step_of(path)) is not None
        ]

    def _check(self, step: int) -> None:
        """Every file of a checkpoint is what was saved: process 0's word.

        Raises:
            UserError: naming the file, and the newest older checkpoint that is whole.
        """

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
            remedy = (
                f"restore it from a copy, or remove {folder} and start again with the same command"
                f" to go on from step {whole}"
                if whole is not None
                else (
                    f"restore it from a copy, or remove {self.directory} to begin anew; no older"
                    " checkpoint is whole"
                )
            )
            raise UserError(f"checkpoint {step} is damaged: {damage}: {remedy}")

        if step == self._pending:
            self.wait()
        if step not in self._checked:
            multihost.agree("files of a checkpoint", look)
            self._checked.add(step)

    def restore(self, arrays: Any, step: int | None = None) -> tuple[int, Any, Any]:
        """Step, arrays and JSON value of a checkpoint, the newest by default.

        Args:
            arrays: a tree of arrays or ``ShapeDtypeStruct`` with the shapes and shardings to
                restore into.

        Raises:
            UserError: no checkpoint, one of another shape, or one with a damaged file.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise UserError(f"{self.directory} has no checkpoint to resume from")
        restored = self._restore(step, arrays=_like(arrays), extra=ocp.args.JsonRestore())
        return step, restored["arrays"], restored["extra"]

    def has(self, step: int, item: str) -> bool:
        """Whether a checkpoint has a further tree of this name: process 0's word."""
        self._check(step)
        return multihost.agree(
            "items of a checkpoint", lambda: (self.directory / f"step_{step}" / item).is_dir()
        )

    def has_array(self, step: int, name: str) -> bool:
        """Whether a checkpoint's arrays have this name anywhere in their paths: process 0's
        word.
        """

        def look() -> bool:
            with ocp.StandardCheckpointer() as checkpointer:
                metadata: Any = checkpointer.metadata(
                    self.directory / f"step_{step}" / "arrays"
                ).item_metadata
            return name in _keys(metadata.tree)

        self._check(step)
        return multihost.agree("names in a checkpoint", look)

    def restore_item(self, step: int, item: str, arrays: Any) -> Any:
        """One of the further trees of a checkpoint; arguments and errors as ``restore`` has
        them.
        """
        return self._restore(step, **{item: _like(arrays)})[item]

    def _restore(self, step: int, **items: Any) -> Any:
        self._check(step)
        args = ocp.args.Composite(**items)
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:
            raise UserError(
                f"checkpoint {step} in {self.directory} does not fit this config"
                f" ({str(error).splitlines()[0]}): resume with the config saved beside it, or"
                " choose another --workdir"
            ) from None

    def close(self) -> None:
        """Waits and releases the folder."""
        self.wait()
        self._manager.close()


def _like(arrays: Any) -> Any:
    return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays))


def _keys(tree: Any) -> set[str]:
    """All keys of nested dicts."""
    children = (
        tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    )
    return set(tree if isinstance(tree, dict) else ()).union(*map(_keys, children))


class _Others:
    """A hook for errors that no caller can catch, except those that ``wait`` raises.

    A save that fails closes its event loop; TensorStore's other writes then report to it, with a
    stack trace for each.
    """

    def __init__(self, hook: Callable[[Any], Any]):
        self._hook = hook

    def __call__(self, unraisable: Any) -> None:
        if not (
            isinstance(unraisable.exc_value, RuntimeError)
            and str(unraisable.exc_value) == "Event loop is closed"
        ):
            self._hook(unraisable)


def _told_by_wait(record: logging.LogRecord) -> bool:
    """Leaves out what is logged of errors in Orbax's threads and tasks, a stack trace for each
    array: ``wait`` raises one of them.
    """
    # which names the task that is awaited no more
    where = record.pathname if record.name != "asyncio" else record.getMessage()
    return record.levelno < logging.ERROR or "/orbax/checkpoint/" not in where
