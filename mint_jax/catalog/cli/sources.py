"""What there is to import under the paths that were given: PEFT directories, Orbax checkpoints and
packed safetensors files.

A folder may come from a stranger. Symbolic links that lead out of it are refused unless asked for,
and never walked in circles; what is no regular file is not opened (a named pipe would wait for
ever).
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


@dataclasses.dataclass(frozen=True)
class Source:
    """One adapter to be.

    Attributes:
        path: a directory (``peft`` or ``orbax``) or a file.
        root: the real folder that its files may not lead out of; None where links may lead
            anywhere.
    """

    path: Path
    peft: bool
    root: Path | None
    orbax: bool = False

    def file(self, name: str, max_bytes: int) -> Path:
        """One of its files, for a packed one ``""``, safe to open.

        Raises:
            UserError: not a regular file, too large, or a link out of the folder.
            OSError: not there, or not readable.
        """
        path = self.path / name if name else self.path
        if self.root is not None and not _inside(path, self.root):
            raise UserError(
                f"{path.name} is a symbolic link out of the folder, which is not followed: copy the"
                " file, or say --follow-links"
            )
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
class Refusal:
    """What was not imported, and why."""

    path: str
    reason: str


def find(paths: Iterable[str], follow_links: bool) -> tuple[list[Source], list[Refusal]]:
    """All adapters under some paths, in the order of the paths and of the names in each folder.

    Raises:
        UserError: a path that is not there.
    """
    found: dict[Path, Source] = {}
    refused: dict[str, Refusal] = {}
    for text in paths:
        path = Path(text)
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            raise UserError(
                f"{text!r} cannot be imported ({getattr(error, 'strerror', None) or error}): check"
                " the path"
            ) from None
        some = _walk(path, follow_links) if stat.S_ISDIR(status.st_mode) else _file(path, None)
        for one in some:
            if isinstance(one, Source):
                found.setdefault(Path(os.path.abspath(one.path)), one)
            else:
                refused.setdefault(os.path.abspath(one.path), one)
    return list(found.values()), list(refused.values())


def pickle_refusal(name: str) -> str:
    """Why a pickle is not read, and what to do."""
    return (
        f"{name} is a pickle, which can run code when it is read: save the adapter with"
        " save_pretrained(safe_serialization=True)"
    )


def _walk(top: Path, follow_links: bool) -> Iterator[Source | Refusal]:
    real_top = Path(os.path.realpath(top))
    root = None if follow_links else real_top
    seen, waiting = {real_top}, [top]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(
                    (entry for entry in listing if not entry.name.startswith(".")),
                    key=lambda entry: entry.name,
                )
        except OSError as error:
            yield Refusal(str(folder), f"the folder cannot be listed ({error.strerror})")
            continue
        names = {entry.name for entry in entries}
        if orbax_files.is_revision(names):  # all that is below is its own
            yield Source(folder, False, root, orbax=True)
            continue
        peft = CONFIG in names
        if peft:
            yield Source(folder, True, root)
        below = []
        for entry in entries:
            path = folder / entry.name
            if _is_dir(entry):
                real = Path(os.path.realpath(path))
                if root is not None and not _inside(path, root):
                    yield Refusal(
                        str(path),
                        "it is a symbolic link out of the folder, which is not followed: see"
                        " --follow-links",
                    )
                elif real not in seen and (
                    follow_links or not entry.is_symlink()
                ):  # what a link inside names is met at its own place
                    seen.add(real)
                    below.append(path)
            elif not peft:
                yield from _file(path, root)
        waiting += reversed(below)


def _is_dir(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def _file(path: Path, root: Path | None) -> Iterator[Source | Refusal]:
    if path.name == WEIGHTS:
        yield Refusal(str(path), f"there is no {CONFIG} beside it, which says rank and scale")
    elif path.name == "adapter_model.bin" or (root is None and path.suffix in PICKLES):
        yield Refusal(str(path), pickle_refusal(path.name))
    elif path.suffix == ".safetensors":
        yield Source(path, False, root)
    elif path.name == CONFIG:
        yield Refusal(str(path), "give the folder that holds it")


def _inside(path: Path, root: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(root)
