"""Discovery of adapters under given paths: PEFT directories, Orbax checkpoints, packed files.

A folder may come from a stranger. Symbolic links that lead out of it are refused, and
links in a circle are not followed. Only regular files are opened: a named pipe would block.
"""

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from mint_jax.catalog import orbax_files
from mint_jax.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_OUTSIDE = "a symbolic link out of the folder, which is not followed"


@dataclasses.dataclass(frozen=True)
class Source:
    """One adapter to import."""

    path: Path  # a directory (``peft`` or ``orbax``) or a file
    peft: bool
    root: Path | None  # the real folder that its files must be in; None if links may lead anywhere
    orbax: bool = False

    def file(self, name: str, max_bytes: int) -> Path:
        """Returns one of its files, ``""`` for a packed one, after checks. Raises ``UserError``:
        not a regular file, too large, or a link out of the folder; ``OSError``: missing or not
        readable.
        """
        path = self.path / name if name else self.path
        if self.root is not None and not _inside(path, self.root):
            raise UserError(f"{path.name} is {_OUTSIDE}: copy the file, or say --follow-links")
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path.name} is no regular file")
        if status.st_size > max_bytes:
            raise UserError(
                f"{path.name} has {status.st_size:,} bytes, and {max_bytes:,} are allowed: see"
                " --max-bytes"
            )
        return path


@dataclasses.dataclass(frozen=True)
class ImportRefusal:
    """A path that was not imported, and the reason."""

    path: str
    reason: str


def find(paths: Iterable[str], follow_links: bool) -> tuple[list[Source], list[ImportRefusal]]:
    """Returns all adapters under some paths, by path and by name in each folder. Raises
    ``UserError``: a path does not exist.
    """
    found: dict[Path, Source] = {}
    refused: dict[str, ImportRefusal] = {}
    for text in paths:
        path = Path(text)
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{text!r} cannot be imported ({reason}): check the path") from None
        for one in _walk(path, follow_links) if is_folder else _file(path, None):
            if isinstance(one, Source):
                found.setdefault(Path(os.path.abspath(one.path)), one)
            else:
                refused.setdefault(os.path.abspath(one.path), one)
    return list(found.values()), list(refused.values())


def pickle_refusal(name: str) -> str:
    """Returns the reason why a pickle is not read, and the remedy."""
    return (
        f"{name} is a pickle, which can run code when it is read: save the adapter with"
        " save_pretrained(safe_serialization=True)"
    )


def _walk(top: Path, follow_links: bool) -> Iterator[Source | ImportRefusal]:
    real_top = Path(os.path.realpath(top))
    root, visited = None if follow_links else real_top, {real_top}
    failed: list[OSError] = []
    for name, folders, files in os.walk(top, onerror=failed.append, followlinks=True):
        folder, below = Path(name), []
        if orbax_files.is_revision({*folders, *files}):  # everything below is the checkpoint's
            yield Source(folder, False, root, orbax=True)
            folders.clear()
            continue
        if peft := CONFIG in files:
            yield Source(folder, True, root)
        for name in sorted(folders):
            path = folder / name
            real = Path(os.path.realpath(path))
            if name.startswith("."):
                continue
            if root is not None and not real.is_relative_to(root):
                yield ImportRefusal(str(path), f"it is {_OUTSIDE}: see --follow-links")
            elif real not in visited and (follow_links or not path.is_symlink()):
                # the target of a link inside the folder is found at its own place
                visited.add(real)
                below.append(name)
        folders[:] = below
        for name in [] if peft else sorted(files):
            if not name.startswith("."):
                yield from _file(folder / name, root)
    for error in failed:
        reason = f"the folder cannot be listed ({error.strerror})"
        yield ImportRefusal(str(error.filename), reason)


def _file(path: Path, root: Path | None) -> Iterator[Source | ImportRefusal]:
    if path.name == WEIGHTS:
        reason = f"there is no {CONFIG} in its folder, which holds rank and scale"
        yield ImportRefusal(str(path), reason)
    elif path.name == "adapter_model.bin" or (root is None and path.suffix in PICKLES):
        yield ImportRefusal(str(path), pickle_refusal(path.name))
    elif path.suffix == ".safetensors":
        yield Source(path, False, root)
    elif path.name == CONFIG:
        yield ImportRefusal(str(path), "give the folder that holds it")


def _inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(root)
