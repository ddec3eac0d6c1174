"""An append-only journal in a folder: a record is on the disk before anybody is told so, and one
sync serves many.

::

    segment  <16 hex digits>.journal, named by the place of its first record:  header, record,
    record, ... header   "mint-journal/2\n\0" | first place u64 | synced place u64 | CRC-32 of these
    record   payload's length u32 | payload's CRC-32 | CRC-32 of place, length and payload's CRC-32
    | payload

All little-endian. A *place* counts the bytes of all records from the journal's beginning, headers
left out: it grows for ever, while segments at the front are deleted. A record's own place is in its
checksum, so that what lies elsewhere is noticed.

Callers queue records; one thread takes all that are queued, writes them, syncs the file once and
only then resolves their tickets. Before it does, it notes in the segment's header how far the file
is synced. The note tells a torn end from damage: what is not whole *behind* it was never
acknowledged, a crash has left it, and it is cut when the journal is opened; what is not whole
*before* it was acknowledged, and is told as ``JournalDamaged`` with file and offset. The note
itself reaches the disk with the next sync, so after a loss of power it may be one sync old, never
ahead.

A write or sync that fails, on a full disk say, refuses the records that are on their way: they are
not acknowledged, and nothing of them stays. Further ones are refused too until the disk takes
writes again, which the journal's thread tries every ``RETRY_S`` seconds: it cuts the newest segment
back to what was acknowledged, as opening does, and writes and syncs a probe. A failed sync is never
repeated over the same bytes, for the kernel may have dropped what it could not write and report
success the second time (Rebello et al. 2020, "Can Applications Recover from fsync Failures?"); for
the same reason opening writes anew whatever it keeps behind the note. Records that note what has
happened already cannot be refused: with ``keep`` they wait, in their order, until the disk takes
them.
"""

import bisect
import collections
import contextlib
import fcntl
import mmap
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from mint_jax.errors import UserError
from mint_jax.files import sync_folder, write_file

MAGIC = b"mint-journal/2\n\0"
HEADER = struct.Struct("<16sQQI")
FRAME = struct.Struct("<III")
# bytes of a payload: no accepted length makes a reader take more memory than this
LONGEST = 1 << 30
RETRY_S = 1.0  # between two tries whether a disk that refused takes writes again
PROBE = 64 << 10  # bytes that it has to take, or as many as wait to be written
# bytes of one write and sync, so that a large group does not keep the first waiting
GROUP = 8 << 20
_PLACED = struct.Struct("<QII")
_SYNCED_AT = 24  # offset of the note in the header
_SUFFIX = ".journal"
# what a crash may leave of ``write_file``
_STAGED = re.compile(r"\.[0-9a-f]{16}\.journal-[0-9a-f]{32}")


class JournalFailed(UserError):
    """The disk refused a write or a sync, or the journal is closed: the record is not in the
    journal.
    """


class JournalDamaged(UserError):
    """Acknowledged bytes are not there, or not what was written."""


class JournalBusy(UserError):
    """Another process, or another object of this one, has the journal open."""


class Overloaded(UserError):
    """The queue is full.

    Attributes:
        retry_after_s: seconds that the last group took: about then there is room.
    """

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Found(NamedTuple):
    """A record on the disk: bytes ``[start, end)`` of the journal."""

    start: int
    end: int
    payload: bytes


class Ticket(Future[int]):
    """A record on its way to the disk; its result is ``end``, once it is there.

    Attributes:
        start, end: its place; final once it is on the disk.
    """

    def __init__(self, payload: bytes, checksum: int, keep: bool):
        super().__init__()
        self.start = self.end = 0
        self.payload, self.checksum, self.keep = payload, checksum, keep
        self.set_running_or_notify_cancel()  # who stops waiting cancels no write

    @property
    def size(self) -> int:
        """Bytes of the record on the disk."""
        return FRAME.size + len(self.payload)

    def place_at(self, start: int) -> int:
        """Gives it a place; returns the one behind it."""
        self.start, self.end = start, start + self.size
        return self.end

    def frame(self) -> bytes:
        """What stands before the payload."""
        placed = zlib.crc32(_PLACED.pack(self.start, len(self.payload), self.checksum))
        return FRAME.pack(len(self.payload), self.checksum, placed)


class Journal:
    """One journal, open for writing; all of it may be called from any thread.

    Args:
        folder: is made where it is missing. Of what is made above it, only the nearest is sure to
            outlast a loss of power.
        segment_bytes: of a file at most, unless one record alone is larger.
        queue_bytes: that may wait to be written; a record that would exceed this waits or is
            refused.

    Attributes:
        end: the place behind the last record.
        trouble: why the disk refuses records now; empty while it takes them.
        cut: bytes that opening cut off: the end of a write that a crash interrupted.

    Raises:
        JournalBusy: it is open elsewhere.
        JournalDamaged: the newest segment is not whole; ``records`` looks at the others.
        JournalFailed: the disk refuses.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, queue_bytes: int = 64 << 20):
        self.folder, self.segment_bytes, self.queue_bytes = folder, segment_bytes, queue_bytes
        self.cut, self.trouble = 0, ""
        self._lock = threading.Lock()
        # something is queued, or the journal is closed
        self._work = threading.Condition(self._lock)
        # something was written, or the disk refuses, or takes records again
        self._room = threading.Condition(self._lock)
        self._releasing = threading.Lock()
        self._queue: collections.deque[Ticket] = collections.deque()
        self._queued = 0  # bytes, those that are being written among them
        self._hasty = False  # somebody waits for what is queued
        self._failed: JournalFailed | None = None
        self._refusals = 0
        self._group_s = 0.01
        with self._explained("open"):
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
            self._guard = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take_lock()
            with self._explained("open"):
                self._firsts = self._list()
                self._handle = self._open_newest()
        except BaseException:
            os.close(self._guard)
            raise
        # on the disk; and behind the last whose ticket is resolved
        self._written = self._told = self.end
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(
        self,
        payload: bytes,
        *,
        checksum: int | None = None,
        wait_s: float | None = 0.0,
        bounded: bool = True,
        lazy: bool = False,
        keep: bool = False,
    ) -> Ticket:
        """Queues a record and returns at once where there is room; its ticket is resolved when it
        is on the disk.

        Records lie in the order of the calls.

        Args:
            checksum: the payload's CRC-32, where the caller has made it already, outside of a lock
                of its own.
            wait_s: seconds to wait for room; 0 refuses at once, None waits however long it takes.
            bounded: whether a full queue counts; for small notes of work that was accepted long ago
                it need not.
            lazy: the record is worth no sync of its own: it goes with the next one, or with
                ``flush`` or ``close``.
            keep: a disk that refuses delays the record, whose ticket is resolved later; without
                this it is refused.

        Raises:
            Overloaded: there was no room.
            JournalFailed: the disk refuses, or the journal is closed.
        """
        if len(payload) > LONGEST:
            raise UserError(
                f"a record of {len(payload)} bytes is too long: at most {LONGEST} are kept; split"
                " the request"
            )
        ticket = Ticket(payload, zlib.crc32(payload) if checksum is None else checksum, keep)
        with self._lock:
            self._check(keep)
            if bounded and not self._fits(ticket.size):
                if wait_s != 0:
                    self._room.wait_for(
                        lambda: self._failed is not None or self.trouble or self._fits(ticket.size),
                        wait_s,
                    )
                    self._check(keep)
                # else it is kept, and would wait for the disk here
                if not self._fits(ticket.size) and not self.trouble:
                    raise Overloaded(
                        f"{self._queued} bytes wait for the disk, of at most {self.queue_bytes}:"
                        " ask again",
                        self._group_s,
                    )
            self.end = ticket.place_at(self.end)
            self._queue.append(ticket)
            self._queued += ticket.size
            if not lazy or self._queued > GROUP:
                self._hurry()
        return ticket

    def wait_for_room(self, nbytes: int, wait_s: float | None) -> None:
        """Returns when a payload of so many bytes would go into the queue or be refused, or when
        the time is over; None is for ever.
        """
        with self._lock:
            self._room.wait_for(
                lambda: self._failed is not None or self.trouble or self._fits(FRAME.size + nbytes),
                wait_s,
            )

    def flush(self) -> int:
        """Waits until everything that was appended is on the disk; returns the place behind it.

        Raises:
            JournalFailed: the disk refuses.
        """
        with self._lock:
            end, refusals = self.end, self._refusals
            if self._queue:
                self._hurry()
            self._room.wait_for(
                lambda: (
                    self._failed is not None
                    or self._refusals > refusals
                    or self.trouble
                    or self._told >= end
                )
            )
            if self._told < end:
                self._check(keep=False)
                raise JournalFailed(
                    f"the disk refused what was appended to the journal {self.folder} last"
                )
        return end

    def records(self) -> Iterator[Found]:
        """All records that were there when the journal was opened, in order; to be read before
        anything is appended.

        Raises:
            JournalDamaged: a record is not what was written, or a segment is missing.
        """
        for first, following in zip(self._firsts, [*self._firsts[1:], self.end], strict=True):
            path = self._path(first)
            with self._explained("read"):
                data = path.read_bytes()
            _check_header(path, data, first)
            place = first
            for found in _scan(data, first):
                place = found.end
                yield found
            if place != following:
                raise _damaged(path, place, first, f"the next segment begins at {following}")

    def read(self, start: int) -> bytes:
        """The payload of the record at a place.

        Raises:
            JournalDamaged: it is not what was written.
        """
        with self._lock:
            first = self._firsts[bisect.bisect_right(self._firsts, start) - 1]
        path = self._path(first)
        with self._explained("read"), open(path, "rb") as file:
            file.seek(HEADER.size + start - first)
            frame = file.read(FRAME.size)
            length = FRAME.unpack(frame)[0] if len(frame) == FRAME.size else 0
            data = frame + file.read(min(length, LONGEST))
        found = next(_scan(data, start, 0), None)
        if found is None:
            raise _damaged(path, start, first, "a record that was whole when it was written")
        return found.payload

    def release(self, place: int) -> int:
        """Deletes the segments of which nothing lies at or behind a place, from the front; returns
        how many.

        Raises:
            JournalFailed: a file cannot be deleted; the journal goes on.
        """
        deleted = 0
        with self._releasing:
            while self.releases(place):
                with self._explained("delete"):
                    self._path(self._firsts[0]).unlink()
                    # so that after a loss of power no gap lies between those that are left
                    sync_folder(self.folder)
                with self._lock:
                    self._firsts.pop(0)
                deleted += 1
        return deleted

    def releases(self, place: int) -> bool:
        """Whether ``release`` would delete anything."""
        with self._lock:
            return len(self._firsts) > 1 and self._firsts[1] <= place

    def close(self) -> None:
        """Writes what is queued and lets others open the journal. Closing again is fine."""
        with self._lock:
            if self._guard < 0:
                return
            guard, self._guard = self._guard, -1
            self._work.notify_all()
            self._room.notify_all()
        self._thread.join()
        with contextlib.suppress(OSError):  # everything acknowledged is synced
            os.close(self._handle)
        os.close(guard)

    def _check(self, keep: bool) -> None:
        if self._failed is not None:
            raise JournalFailed(str(self._failed))
        if self._guard < 0:
            raise JournalFailed(f"journal {self.folder} is closed: open it again")
        if self.trouble and not keep:
            raise JournalFailed(self.trouble)

    def _hurry(self) -> None:
        self._hasty = True
        self._work.notify()

    def _fits(self, size: int) -> bool:
        return self._queued == 0 or self._queued + size <= self.queue_bytes

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:016x}{_SUFFIX}"

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise JournalFailed(
                f"cannot {doing} the journal {self.folder} ({error.strerror or error}): check the"
                " disk"
            ) from error

    # opening

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalBusy(
                f"journal {self.folder} is open already: end the other process, or choose another"
                " folder"
            ) from None

    def _list(self) -> list[int]:
        """First places of the segments, in order."""
        firsts = []
        for path in self.folder.iterdir():
            if path.suffix == _SUFFIX and re.fullmatch(r"[0-9a-f]{16}", path.stem):
                firsts.append(int(path.stem, 16))
            elif _STAGED.fullmatch(path.name):
                path.unlink()
        return sorted(firsts)

    def _open_newest(self) -> int:
        """The handle of the newest segment, its torn end cut off, everything in it on the disk;
        sets ``end``.
        """
        if not self._firsts:
            self.end = 0
            handle = self._create(0)
            self._firsts.append(0)
            return handle
        first = self._firsts[-1]
        path = self._path(first)
        data = path.read_bytes()
        synced = _check_header(path, data, first)
        whole = first
        for found in _scan(data, first):
            whole = found.end
        if whole < synced:
            raise _damaged(path, whole, first, f"records up to {synced} were acknowledged")
        self.end, self.cut = whole, len(data) - HEADER.size - (whole - first)
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            keep = HEADER.size + whole - first
            _write(handle, data[HEADER.size + synced - first : keep], HEADER.size + synced - first)
            os.ftruncate(handle, keep)
            os.fsync(handle)
            self._note(handle, first, whole)
        except BaseException:
            os.close(handle)
            raise
        return handle

    # the writer's thread

    def _create(self, first: int) -> int:
        path = self._path(first)
        write_file(path, _header(first, first), replace=False)
        sync_folder(self.folder)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def _note(self, handle: int, first: int, synced: int) -> None:
        _write(handle, _header(first, synced)[_SYNCED_AT:], _SYNCED_AT)

    def _run(self) -> None:
        group: list[Ticket] = []
        try:
            while not self.trouble or self._recovered():
                if not (group := self._next()):
                    return
                began = time.monotonic()
                try:
                    self._commit(group)
                except OSError as error:
                    self._refuse(error, group)
                    continue
                for ticket in group:
                    ticket.set_result(ticket.end)
                with self._lock:
                    self._queued -= group[-1].end - group[0].start
                    self._group_s = time.monotonic() - began
                    self._told = self._written
                    self._room.notify_all()
            self._fail(JournalFailed(self.trouble), [])
        except (
            BaseException
        ) as error:  # a defect of ours, or damage: nothing more may be acknowledged
            self._fail(
                JournalFailed(f"the journal {self.folder} has failed ({error!r}): open it again"),
                group,
            )

    def _next(self) -> list[Ticket]:
        """What one write takes: all that is queued and goes into a segment; nothing once the
        journal is closed.
        """
        with self._lock:
            self._work.wait_for(lambda: (self._queue and self._hasty) or self._guard < 0)
            group: list[Ticket] = []
            while self._queue:
                end = self._queue[0].end
                if group and (
                    end - group[0].start > GROUP
                    or end - self._segment_for(group[0]) > self.segment_bytes
                ):
                    break
                group.append(self._queue.popleft())
            self._hasty = bool(self._queue)
            return group

    def _segment_for(self, ticket: Ticket) -> int:
        """First place of the segment that a record goes into: the newest, or one that begins with
        it.
        """
        first = self._firsts[-1]
        return (
            ticket.start
            if ticket.start > first and ticket.end - first > self.segment_bytes
            else first
        )

    def _commit(self, group: list[Ticket]) -> None:
        first = self._segment_for(group[0])
        if first != self._firsts[-1]:
            handle = self._create(first)
            os.close(self._handle)
            self._handle = handle
            with self._lock:
                self._firsts.append(first)
        data = b"".join(part for ticket in group for part in (ticket.frame(), ticket.payload))
        _write(self._handle, data, HEADER.size + self._written - first)
        os.fsync(self._handle)
        self._note(self._handle, first, group[-1].end)
        self._written = group[-1].end

    def _refuse(self, error: OSError, group: list[Ticket]) -> None:
        """After a write that failed: what may be refused is, and the rest has the places from what
        was acknowledged on.
        """
        with self._lock:
            queued = [*group, *self._queue]
            self.trouble, self.end = self._why(error), self._written
            self._refusals += 1
            self._queue = collections.deque(ticket for ticket in queued if ticket.keep)
            for ticket in self._queue:
                self.end = ticket.place_at(self.end)
            self._queued, self._hasty = self.end - self._written, bool(self._queue)
            self._room.notify_all()
        for ticket in queued:
            if not ticket.keep:
                ticket.set_exception(JournalFailed(self.trouble))

    def _why(self, error: OSError) -> str:
        why = (
            f"cannot write the journal {self.folder} ({error.strerror or error}): free space on its"
            " disk, or mend it"
        )
        return f"{why}; it goes on by itself then"

    def _recovered(self) -> bool:
        """Waits until the disk takes writes again; False once the journal is closed and it still
        does not.
        """
        while True:
            with self._lock:
                closing = self._work.wait_for(lambda: self._guard < 0, RETRY_S)
            try:
                self._cut()
            except OSError as error:
                if closing:
                    return False
                with self._lock:
                    self.trouble = self._why(error)
                continue
            with self._lock:
                self.trouble = ""
                self._room.notify_all()
            return True

    def _cut(self) -> None:
        """Leaves of the newest segment what was acknowledged, and looks whether there is room
        behind it.
        """
        first = self._firsts[-1]
        end = HEADER.size + self._written - first
        for begun in self._list():
            if begun > first:
                self._path(begun).unlink()
        os.ftruncate(self._handle, end)
        start = max(HEADER.size, end - mmap.PAGESIZE)
        probe = bytes(max(PROBE, self._queued))
        # the last page may have been dropped
        _write(self._handle, os.pread(self._handle, end - start, start) + probe, start)
        os.fsync(self._handle)
        os.ftruncate(self._handle, end)
        self._note(self._handle, first, self._written)
        os.fsync(self._handle)

    def _fail(self, failed: JournalFailed, group: list[Ticket]) -> None:
        with self._lock:
            self._failed = failed
            lost = [ticket for ticket in (*group, *self._queue) if not ticket.done()]
            self._queue.clear()
            self._room.notify_all()
        for ticket in lost:
            ticket.set_exception(failed)


def _header(first: int, synced: int) -> bytes:
    fields = HEADER.pack(MAGIC, first, synced, 0)[:-4]
    return fields + zlib.crc32(fields).to_bytes(4, "little")


def _check_header(path: Path, data: bytes, first: int) -> int:
    """How far a segment is synced.

    Raises:
        JournalDamaged: the header is not whole.
        UserError: another version wrote it.
    """
    if len(data) >= HEADER.size:
        magic, mine, synced, checksum = HEADER.unpack_from(data)
        if checksum == zlib.crc32(data[: HEADER.size - 4]):
            if magic != MAGIC:
                raise UserError(
                    f"{path} is a journal of another version ({magic!r}; this is {MAGIC!r}): open"
                    " it with that one"
                )
            if mine == first and synced >= first:
                return synced
    raise JournalDamaged(
        f"{path} is damaged at offset 0: its header is not what was written; restore the file from"
        " a copy"
    )


def _scan(data: bytes, first: int, offset: int = HEADER.size) -> Iterator[Found]:
    """Records of a segment's bytes from an offset, whose place is ``first``, up to the first that
    is not whole.
    """
    base = first - offset
    while offset + FRAME.size <= len(data):
        length, checksum, placed = FRAME.unpack_from(data, offset)
        end = offset + FRAME.size + length
        if (
            placed != zlib.crc32(_PLACED.pack(base + offset, length, checksum))
            or length > LONGEST
            or end > len(data)
        ):
            return
        payload = data[offset + FRAME.size : end]
        if zlib.crc32(payload) != checksum:
            return
        yield Found(base + offset, base + end, payload)
        offset = end


def _damaged(path: Path, place: int, first: int, expected: str) -> JournalDamaged:
    offset = HEADER.size + place - first
    return JournalDamaged(
        f"{path} is damaged at offset {offset}: no whole record there, yet {expected}; restore the"
        " file from a copy"
    )


def _write(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(handle, view, offset)
        view, offset = view[done:], offset + done
