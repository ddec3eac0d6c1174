"""Atomic files and folders: written under a temporary name in the same folder, then renamed. And
JSON objects, read.
"""

import contextlib
import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mint_jax.errors import UserError


def _temporary_name(target: Path) -> Path:
    """Returns a unique temporary name in the same folder, hence on the same disk."""
    return target.parent / f".{target.name[:100]}-{uuid.uuid4().hex}"


def write_file(target: Path, data: str | bytes, *, replace: bool = True) -> None:
    """Writes a file durably and atomically: after a crash either the old or the new contents
    remain. Raises ``FileExistsError`` if it exists and must not be replaced, or ``OSError``.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _temporary_name(target)
    try:
        # unlike tempfile's, with the permissions of the user's umask
        with open(staging, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(staging, target)
        else:
            os.link(staging, target)  # unlike a rename, never replaces a file
        sync_folder(target.parent)
    finally:
        staging.unlink(missing_ok=True)


def read_object(path: Path, remedy: str = "fetch the checkpoint again") -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ``UserError`` with the remedy for anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): {remedy}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}; expected a JSON object: {remedy}")
    return found


def link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where links are impossible; durable on return."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        write_file(target, source.read_bytes())
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Makes creations, renames and removals in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_directory(target: Path, proof: str = "") -> Iterator[Path]:
    """Yields a folder that becomes ``target``, absent or empty, when the block ends. Raises
    ``OSError`` if ``target`` exists; with ``proof``, the name of a file that every complete
    ``target`` has, a complete one stays, and another is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _temporary_name(target)
    staging.mkdir()
    try:
        yield staging
        try:
            os.replace(staging, target)
        except OSError:
            if not proof:
                raise
            if not (target / proof).is_file():
                shutil.rmtree(target)
                os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
