"""Files and folders that appear whole or not at all: written beside their place under another name,
then renamed.
"""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


def _beside(target: Path) -> Path:
    """A name of its own in the same folder, hence on the same disk: a rename moves no bytes."""
    return target.parent / f".{target.name[:100]}-{uuid.uuid4().hex}"


def write_file(target: Path, data: str | bytes, *, replace: bool = True) -> None:
    """Writes a file. It is on the disk when this returns; a crash leaves what stood there before.

    Args:
        replace: what stands there already; otherwise it stays.

    Raises:
        FileExistsError: something stands there, and may not be replaced.
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(target)
    try:
        # unlike tempfile's, with the rights that the user's umask gives
        with open(staging, "xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(staging, target)
        else:
            os.link(staging, target)  # unlike a rename it replaces nothing that appeared meanwhile
        sync_folder(target.parent)
    finally:
        staging.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where that is not possible; on the disk when this
    returns.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        write_file(target, source.read_bytes())
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in a folder is so on the disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def new_directory(target: Path, proof: str = "") -> Iterator[Path]:
    """Yields a folder that becomes ``target`` when the block ends; a crash leaves no ``target``
    behind.

    An empty folder in its place is replaced.

    Args:
        proof: a file that every whole ``target`` has. Where another process made the same
            ``target`` meanwhile, that one then stays, and what stands there without this file is
            replaced.

    Raises:
        OSError: something else stands there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _beside(target)
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
