"""A witness to the commits of an SQLite database: how far its audit log has been, told outside of it.

SQLite's write-ahead log ends, for SQLite, at the first page whose checksum is wrong. A flipped bit or a cut there takes back
commits that were acknowledged, without a word. So the id of the last entry of the audit log is noted in a file beside the
database once its commit has returned: a database that has less has lost some. A crash of the machine may leave the note
behind the database, which proves nothing; it never runs ahead.
"""

import contextlib
import mmap
import struct
from pathlib import Path

_NOTE = struct.Struct("<qq")  # the id, and its complement: a note that is half written, or damaged, is none


class Witness:
    """The note beside one database; where it cannot be kept, say in a folder that is read-only, there is none.

    Args:
        database: the database's file.
    """

    def __init__(self, database: Path):
        self._map: mmap.mmap | None = None
        path = database.with_name(database.name + ".seen")
        with contextlib.suppress(OSError, ValueError):
            with open(path, "ab"):  # makes it
                pass
            with open(path, "r+b") as file:
                if file.seek(0, 2) < _NOTE.size:
                    file.truncate(_NOTE.size)
                self._map = mmap.mmap(file.fileno(), _NOTE.size)

    @property
    def seen(self) -> int:
        """The highest id noted; 0 where there is no note."""
        if self._map is None:
            return 0
        last, complement = _NOTE.unpack_from(self._map)
        return last if last == ~complement else 0

    def note(self, last: int) -> None:
        """Notes that the entry with this id is committed."""
        if last > self.seen:
            self.reset(last)

    def reset(self, last: int) -> None:
        """Notes this id whatever was noted before."""
        if self._map is not None:
            _NOTE.pack_into(self._map, 0, last, ~last)

    def close(self) -> None:
        """Lets go of the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
