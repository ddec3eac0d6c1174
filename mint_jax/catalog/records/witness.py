"""A witness to the commits of an SQLite database: how far its audit log has been, recorded outside of it.

SQLite's write-ahead log ends, for SQLite, at the first page whose checksum is wrong. A flipped bit or a cut there takes back
commits that were acknowledged, without a word. So the id of the last entry of the audit log is noted in a file beside the
database once its commit has returned: a database that has less has lost some. A crash of the machine may leave the note
behind the database, which proves nothing; it never runs ahead.
"""

import contextlib
import os
import struct
import threading
from pathlib import Path

_NOTE = struct.Struct("<qq")  # the id, and its complement: a note that is half written, or damaged, is none


class Witness:
    """The note beside one database; where it cannot be kept, say in a folder that is read-only, there is none.

    Args:
        database: the database's file.
    """

    def __init__(self, database: Path):
        self._file = -1
        self._lock = threading.Lock()  # a number that is written to must not be closed, and another file's, meanwhile
        with contextlib.suppress(OSError):
            self._file = os.open(database.with_name(database.name + ".seen"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @property
    def seen(self) -> int:
        """The highest id noted; 0 where there is no note."""
        with contextlib.suppress(OSError, struct.error):
            last, complement = _NOTE.unpack(os.pread(self._file, _NOTE.size, 0))
            return last if last == ~complement else 0
        return 0

    def note(self, last: int) -> None:
        """Notes that the entry with this id is committed."""
        if last > self.seen:
            self.reset(last)

    def reset(self, last: int) -> None:
        """Notes this id whatever was noted before. Not synced: a system that crashes may forget it, and that is all right."""
        with self._lock, contextlib.suppress(OSError):  # the commit is made, with or without a note
            os.pwrite(self._file, _NOTE.pack(last, ~last), 0)

    def close(self) -> None:
        """Lets go of the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
