"""The journal on its disk: order, segments, torn ends, damage, disks that refuse."""

import errno
import json
import os
import struct
import threading
import time
import zlib
from pathlib import Path

import pytest

from mint_jax.service import journal as journal_lib
from mint_jax.service.journal import (
    FRAME,
    HEADER,
    Journal,
    JournalBusy,
    JournalDamaged,
    JournalFailed,
    Overloaded,
)
from tests.disks import LIMITS, run_limited


def payloads(rng, count, longest=40):
    return [rng.bytes(int(rng.integers(0, longest))) for _ in range(count)]


def contents(folder, **options):
    """What a journal holds, as it is when it is opened."""
    with Journal(folder, **options) as journal:
        return [found.payload for found in journal.records()]


def segments(folder):
    return sorted(folder.glob("*.journal"))


def copy(source, target, change=None):
    """A copy of a journal, as a crash at this moment would leave it; ``change(name, data)`` may
    alter its files.
    """
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for path in segments(source):
        data = path.read_bytes()
        (target / path.name).write_bytes(data if change is None else change(path.name, data))
    return target


def test_what_was_appended_is_found_in_order(tmp_path, rng):
    wanted = payloads(rng, 50)
    with Journal(tmp_path / "journal") as journal:
        tickets = [journal.append(payload) for payload in wanted]
        assert [ticket.result() for ticket in tickets] == [ticket.end for ticket in tickets]
        assert [ticket.start for ticket in tickets] == [0, *(ticket.end for ticket in tickets[:-1])]
        assert (
            journal.flush() == journal.end == sum(FRAME.size + len(payload) for payload in wanted)
        )
        assert [journal.read(ticket.start) for ticket in tickets] == wanted
    more = payloads(rng, 5)
    with Journal(tmp_path / "journal") as journal:
        assert [found.payload for found in journal.records()] == wanted
        assert journal.cut == 0
        for payload in more:
            journal.append(payload)  # closing writes what is queued
    assert contents(tmp_path / "journal") == wanted + more


def test_the_format_is_what_the_page_says(tmp_path):
    """Bytes made here by hand are read, and those written are the same: a change of the format
    needs another version.
    """
    with Journal(tmp_path / "journal") as journal:
        journal.append(b"one").result()
        journal.append(b"two!").result()
    data = b""
    for payload in (b"one", b"two!"):
        placed = struct.pack("<QII", len(data), len(payload), zlib.crc32(payload))
        data += struct.pack("<III", len(payload), zlib.crc32(payload), zlib.crc32(placed)) + payload
    head = b"mint-journal/2\n\0" + struct.pack("<QQ", 0, len(data))
    assert [path.name for path in segments(tmp_path / "journal")] == ["0000000000000000.journal"]
    assert (
        segments(tmp_path / "journal")[0].read_bytes()
        == head + struct.pack("<I", zlib.crc32(head)) + data
    )


def test_threads_find_their_own_records_each_in_its_order(tmp_path):
    def write(thread):
        for k in range(60):
            ticket = journal.append(f"{thread} {k}".encode())
            assert (
                journal.read(ticket.result() - FRAME.size - len(f"{thread} {k}"))
                == f"{thread} {k}".encode()
            )

    with Journal(tmp_path / "journal", segment_bytes=500) as journal:
        threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [tuple(map(int, payload.split())) for payload in contents(tmp_path / "journal")]
    for i in range(8):
        assert [k for thread, k in found if thread == i] == list(range(60))
    assert len(found) == 8 * 60


def test_many_records_share_a_sync(tmp_path, monkeypatch):
    syncs, gate = [], threading.Event()

    def sync(handle):
        syncs.append(handle)
        gate.wait(30)

    with Journal(tmp_path / "journal") as journal:
        monkeypatch.setattr(journal_lib.os, "fsync", sync)
        tickets = [journal.append(b"x") for _ in range(100)]
        assert not any(ticket.done() for ticket in tickets), (
            "before the sync has returned nobody is told"
        )
        gate.set()
        journal.flush()
        assert len(syncs) <= 2, "one for the first, and one for those that came meanwhile"
        monkeypatch.undo()


def test_a_lazy_record_waits_for_company(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        notes = [journal.append(b"note", lazy=True) for _ in range(3)]
        time.sleep(0.05)
        assert not any(note.done() for note in notes)
        journal.append(b"record").result(30)
        assert all(note.done() for note in notes), "they lie before it"
        note = journal.append(b"flushed", lazy=True)
        assert journal.flush() == note.result(0)
        journal.flush()
        note = journal.append(b"closed", lazy=True)
        time.sleep(0.05)
        assert not note.done(), "a flush of nothing hurries nobody later"
        large = journal.append(bytes(journal_lib.GROUP), lazy=True)
        assert large.result(30) == journal.end, "not too many wait"
        journal.append(b"the last", lazy=True)
    assert contents(tmp_path / "journal")[-3:] == [b"closed", bytes(journal_lib.GROUP), b"the last"]


def test_segments_are_bounded_and_deleted_from_the_front(tmp_path, rng):
    wanted = payloads(rng, 200)
    with Journal(tmp_path / "journal", segment_bytes=400) as journal:
        tickets = [journal.append(payload) for payload in wanted]
        journal.flush()
        assert len(segments(tmp_path / "journal")) > 5
        assert all(
            path.stat().st_size <= HEADER.size + 400 for path in segments(tmp_path / "journal")
        )
        large = journal.append(bytes(1000))
        journal.append(b"behind it")
        journal.flush()
        assert [path.stat().st_size for path in segments(tmp_path / "journal")][
            -2
        ] == HEADER.size + FRAME.size + 1000
        needed = int(rng.integers(50, 150))
        assert journal.releases(tickets[needed].start)
        assert journal.release(tickets[needed].start) > 0
        assert journal.release(tickets[needed].start) == 0
        assert journal.read(tickets[needed].start) == wanted[needed]
    with Journal(tmp_path / "journal", segment_bytes=400) as journal:
        found = list(journal.records())
        assert [one.payload for one in found[-2:]] == [bytes(1000), b"behind it"]
        assert found[0].start <= tickets[needed].start
        assert tickets[needed].start - found[0].start <= 400, "all whole segments before went"
        kept = [ticket.start for ticket in tickets].index(found[0].start)
        assert [one.payload for one in found[:-2]] == wanted[kept:]
        assert journal.release(journal.end) > 0
        assert len(segments(tmp_path / "journal")) == 1, (
            "the newest stays: it says how far the journal was"
        )
    assert large.end == found[-2].end


def test_a_journal_is_opened_once(tmp_path):
    with Journal(tmp_path / "journal"), pytest.raises(JournalBusy, match="is open already"):
        Journal(tmp_path / "journal")
    Journal(tmp_path / "journal").close()


def test_a_closed_journal_takes_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.close()
    journal.close()
    with pytest.raises(JournalFailed, match="is closed"):
        journal.append(b"x")


def test_a_torn_end_is_cut_at_every_byte(tmp_path, rng):
    """A crash while the second group is written: any part of it may be there, and the note is still
    the first's.
    """
    first, second = payloads(rng, 3), [rng.bytes(9), b"", rng.bytes(30)]
    with Journal(tmp_path / "whole") as journal:
        for payload in first:
            journal.append(payload)
        journal.flush()
        [path] = segments(tmp_path / "whole")
        before = path.read_bytes()
        ends = [journal.append(payload).result() for payload in second]
    after = path.read_bytes()
    for size in range(len(before), len(after) + 1):
        here = copy(
            tmp_path / "whole",
            tmp_path / "torn",
            lambda name, data, n=size: before + data[len(before) : n],
        )
        with Journal(here) as journal:
            kept = [found.payload for found in journal.records()]
            whole = sum(end + HEADER.size <= size for end in ends)
            assert kept == first + second[:whole]
            assert journal.cut == size - HEADER.size - (
                ends[whole - 1] if whole else len(before) - HEADER.size
            )
            journal.append(b"goes on").result()
        assert contents(here) == [*kept, b"goes on"]


def test_an_end_of_zeros_or_of_anything_is_cut_behind_the_note(tmp_path, rng):
    """After a loss of power the file may be longer than what was written of it, and pages of one
    write may lack before others.
    """
    with Journal(tmp_path / "whole") as journal:
        journal.append(b"acknowledged").result()
        before = segments(tmp_path / "whole")[0].read_bytes()
        for _ in range(3):
            journal.append(rng.bytes(100))
        journal.flush()
    for tail in (bytes(int(rng.integers(1, 10_000))), rng.bytes(int(rng.integers(1, 1000)))):
        here = copy(tmp_path / "whole", tmp_path / "torn", lambda name, data, t=tail: before + t)
        assert contents(here) == [b"acknowledged"]
    here = copy(
        tmp_path / "whole",
        tmp_path / "torn",
        lambda name, data: before + bytes(112) + data[len(before) + 112 :],
    )
    assert contents(here) == [b"acknowledged"], "what follows a hole was not acknowledged either"


def test_a_file_cut_before_its_note_is_damaged(tmp_path, rng):
    with Journal(tmp_path / "whole") as journal:
        for payload in payloads(rng, 4):
            journal.append(payload)
    size = segments(tmp_path / "whole")[0].stat().st_size
    for n in range(size):
        here = copy(tmp_path / "whole", tmp_path / "cut", lambda name, data, n=n: data[:n])
        with pytest.raises(
            JournalDamaged, match=r"0000000000000000\.journal is damaged at offset \d+"
        ):
            Journal(here)


def test_a_flipped_bit_is_told_with_its_place(tmp_path, rng):
    """Every byte of a journal of several segments, a bit of each; the offset told is that of the
    record, or of the header.
    """
    with Journal(tmp_path / "whole", segment_bytes=100) as journal:
        for payload in payloads(rng, 8):
            journal.append(payload)
        journal.flush()
        records = list(Journal.records(journal))
    assert len(records) == 8
    wanted = contents(copy(tmp_path / "whole", tmp_path / "flipped"))
    for path in segments(tmp_path / "whole"):
        first = int(path.stem, 16)
        for at in range(path.stat().st_size):
            bit = 1 << int(rng.integers(8))

            def flip(name, data, path=path, at=at, bit=bit):
                return (
                    data
                    if name != path.name
                    else data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
                )

            here = copy(tmp_path / "whole", tmp_path / "flipped", flip)
            hit = [
                one
                for one in records
                if one.start - first + HEADER.size <= at < one.end - first + HEADER.size
            ]
            offset = (
                max((one.start for one in hit if one.start >= first), default=first - HEADER.size)
                - first
                + HEADER.size
            )
            with pytest.raises(
                JournalDamaged, match=rf"{path.name} is damaged at offset {offset}:"
            ):
                contents(here)
    assert contents(copy(tmp_path / "whole", tmp_path / "flipped")) == wanted


def test_a_missing_or_strange_segment_is_told(tmp_path, rng):
    with Journal(tmp_path / "whole", segment_bytes=100) as journal:
        for _ in range(12):
            journal.append(rng.bytes(30))
    names = [path.name for path in segments(tmp_path / "whole")]
    assert len(names) == 6
    here = copy(tmp_path / "whole", tmp_path / "less")
    (here / names[2]).unlink()
    with pytest.raises(
        JournalDamaged, match=rf"{names[1]} is damaged at offset \d+: .* the next segment begins at"
    ):
        contents(here)
    here = copy(tmp_path / "whole", tmp_path / "less")
    os.replace(here / names[3], here / names[2])
    with pytest.raises(JournalDamaged, match=rf"{names[1]}|{names[2]} is damaged"):
        contents(here)
    here = copy(
        tmp_path / "whole", tmp_path / "less", lambda name, data: b"" if name == names[-1] else data
    )
    with pytest.raises(JournalDamaged, match=rf"{names[-1]} is damaged at offset 0"):
        contents(here)


def test_a_record_of_a_live_journal_is_checked_when_it_is_read(tmp_path):
    with Journal(tmp_path / "journal") as journal:
        one, two = journal.append(b"one"), journal.append(b"two")
        journal.flush()
        [path] = segments(tmp_path / "journal")
        with path.open("r+b") as file:
            file.seek(HEADER.size + two.start + FRAME.size)
            file.write(b"T")
        assert journal.read(one.start) == b"one"
        with pytest.raises(JournalDamaged, match=f"offset {HEADER.size + two.start}"):
            journal.read(two.start)


def test_another_version_is_not_taken_for_damage(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(journal_lib, "MAGIC", b"mint-journal/3\n\0")
        Journal(tmp_path / "journal").close()
    with pytest.raises(journal_lib.UserError, match="another version") as caught:
        Journal(tmp_path / "journal")
    assert not isinstance(caught.value, JournalDamaged)


def test_what_a_crash_left_of_a_new_segment_is_removed(tmp_path):
    Journal(tmp_path / "journal").close()
    left = tmp_path / "journal" / f".{0:016x}.journal-{'a' * 32}"
    left.write_bytes(b"half")
    (tmp_path / "journal" / "notes.txt").write_text("somebody's")
    Journal(tmp_path / "journal").close()
    assert not left.exists()
    assert (tmp_path / "journal" / "notes.txt").exists()


def test_a_full_queue_refuses_or_waits(tmp_path, monkeypatch):
    gate, real = threading.Event(), os.fsync

    def slow(handle):
        gate.wait(30)
        real(handle)

    with Journal(tmp_path / "journal", queue_bytes=1000) as journal:
        monkeypatch.setattr(journal_lib.os, "fsync", slow)
        tickets = [journal.append(bytes(5000))]  # alone it may exceed the bound
        with pytest.raises(Overloaded, match="ask again") as caught:
            journal.append(b"x")
        assert caught.value.retry_after_s > 0
        began = time.monotonic()
        with pytest.raises(Overloaded):
            journal.append(b"x", wait_s=0.2)
        assert time.monotonic() - began >= 0.2
        tickets.append(journal.append(b"a note", bounded=False))
        waited = []
        thread = threading.Thread(
            target=lambda: waited.append(journal.append(b"waits", wait_s=None).result())
        )
        thread.start()
        time.sleep(0.05)
        assert not waited
        gate.set()
        thread.join(30)
        assert waited == [journal.end]
        assert all(ticket.done() for ticket in tickets)
    assert contents(tmp_path / "journal") == [bytes(5000), b"a note", b"waits"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("fsync", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("pwrite", errno.ENOSPC),
        ("pwrite", errno.EIO),
        ("link", errno.ENOSPC),
    ],
)
def test_a_disk_that_refuses_is_waited_for(tmp_path, monkeypatch, rng, call, code):
    """Nothing of what failed is acknowledged or stays; what may not be refused is written, in its
    order, once there is space again.
    """
    monkeypatch.setattr(journal_lib, "RETRY_S", 0.05)
    before, folder = payloads(rng, 5), tmp_path / "journal"
    with Journal(folder, segment_bytes=200) as journal:
        for payload in before:
            journal.append(payload)
        journal.flush()
        calls, gate = [], threading.Event()
        wanted = [rng.bytes(100) for _ in range(6)]  # at least one of them begins a segment
        with monkeypatch.context() as patch:

            def refuse(*arguments, **_):
                calls.append(arguments)
                gate.wait(30)
                raise OSError(code, os.strerror(code))

            patch.setattr(os, call, refuse)
            tickets = [journal.append(payload, keep=i % 2 == 1) for i, payload in enumerate(wanted)]
            gate.set()
            with pytest.raises(JournalFailed, match=os.strerror(code)):
                tickets[-2].result(30)
            assert os.strerror(code) in journal.trouble
            with pytest.raises(JournalFailed, match="goes on by itself"):
                journal.append(b"refused")
            with pytest.raises(JournalFailed):
                journal.flush()
            tickets.append(journal.append(b"kept", keep=True, wait_s=None))
            wanted.append(b"kept")
            time.sleep(0.2)
            assert not tickets[-1].done()
            copy(folder, tmp_path / "crashed")
        assert contents(tmp_path / "crashed", segment_bytes=200)[: len(before)] == before
        assert tickets[-1].result(30) == journal.end
        assert journal.trouble == ""
        written = [
            payload
            for payload, ticket in zip(wanted, tickets, strict=True)
            if ticket.exception() is None
        ]
        assert {wanted[1], wanted[3], wanted[5], b"kept"} <= set(written)
        assert wanted[4] not in written
        journal.append(b"later").result(30)
        for payload, ticket in zip(wanted, tickets, strict=True):
            if ticket.exception() is None:
                assert journal.read(ticket.start) == payload
    assert contents(folder, segment_bytes=200) == [*before, *written, b"later"]


def test_a_disk_with_room_for_less_than_what_waits_is_no_disk_with_room(tmp_path, monkeypatch):
    """Else small requests would be taken and refused in turn, and readiness would flap."""
    monkeypatch.setattr(journal_lib, "RETRY_S", 0.02)
    real = os.pwrite

    def small_only(handle, data, offset):
        if len(data) > 2 * journal_lib.PROBE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data, offset)

    with Journal(tmp_path / "journal") as journal:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", small_only)
            large = journal.append(bytes(3 * journal_lib.PROBE), keep=True)
            give_up = time.monotonic() + 30
            while not journal.trouble:
                assert time.monotonic() < give_up
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                assert journal.trouble
        assert large.result(30) == journal.end
        journal.append(b"small").result(30)


def test_a_journal_that_is_closed_while_the_disk_refuses_ends(tmp_path, monkeypatch):
    """What it could not write was never acknowledged; with space again its last try writes it."""
    monkeypatch.setattr(journal_lib, "RETRY_S", 30.0)
    for back in (False, True):
        folder = tmp_path / f"journal {back}"
        with monkeypatch.context() as patch:
            journal = Journal(folder)
            patch.setattr(
                os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space"))
            )
            refused, kept = journal.append(b"refused"), journal.append(b"kept", keep=True)
            with pytest.raises(JournalFailed, match="no space"):
                refused.result(30)
            if back:
                patch.undo()
            journal.close()
        assert (kept.exception(0) is None) == back
        assert contents(folder) == [b"kept"] * back


def test_what_a_failed_sync_may_have_dropped_is_written_anew(tmp_path, monkeypatch):
    """A kernel may drop pages that it could not write and call them clean: they are read back, but
    are not on the disk.
    """
    folder = tmp_path / "journal"
    with Journal(folder) as journal:
        journal.append(b"acknowledged").result()
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.EIO, "the disk"))
            )
            with pytest.raises(JournalFailed):
                journal.append(b"dropped").result(30)
            copy(folder, tmp_path / "crashed")
    written, real = [], os.pwrite

    def watch(handle, data, offset):
        written.append(bytes(data))
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", watch)
    assert contents(tmp_path / "crashed") == [b"acknowledged", b"dropped"]
    assert len(written) == 2
    assert written[0].endswith(b"dropped"), "then the note"
    assert b"acknowledged" not in written[0]


def test_a_write_that_takes_only_a_part_is_continued(tmp_path, monkeypatch, rng):
    real = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda handle, data, offset: real(handle, data[: max(1, len(data) // 2)], offset),
    )
    wanted = payloads(rng, 10)
    with Journal(tmp_path / "journal") as journal:
        for payload in wanted:
            journal.append(payload).result()
    monkeypatch.undo()
    assert contents(tmp_path / "journal") == wanted


def fill_the_disk(directory: str):
    """Appends until the disk is full, makes room, goes on, and looks at what is there. Run by
    ``run_limited``.
    """
    folder, kept, why = Path(directory) / "journal", 0, ""
    journal_lib.RETRY_S = 0.05
    journal = Journal(folder, segment_bytes=100_000)
    for k in range(100_000):
        try:
            journal.append(k.to_bytes(4, "little") * 1000).result()
        except JournalFailed as error:
            why = str(error)
            break
        kept += 1
    waits = journal.append(kept.to_bytes(4, "little") * 1000, keep=True)
    full = journal.trouble != ""
    journal.release(journal.end - 300_000)
    waits.result(60)
    journal.append((kept + 1).to_bytes(4, "little") * 1000).result()
    journal.close()
    found = [int.from_bytes(one[:4], "little") for one in contents(folder)]
    print(
        json.dumps(
            {"kept": kept, "found": found, "why": why, "full": full, "trouble": journal.trouble}
        )
    )


@pytest.mark.parametrize("limit", LIMITS[:1])
def test_a_full_disk_loses_nothing_that_was_acknowledged_and_is_used_again(tmp_path, limit):
    report = json.loads(run_limited(limit, 2, "tests.service.journal_test", tmp_path))
    assert report["kept"] > 100
    assert report["full"]
    assert report["found"] == list(range(report["found"][0], report["kept"] + 2)), (
        "and what was refused is not there"
    )
    assert "cannot write the journal" in report["why"]
    assert report["trouble"] == ""
