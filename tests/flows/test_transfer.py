"""Files that lie elsewhere, streamed into the origin: whole, once, and on from where it broke."""

from __future__ import annotations

import hashlib
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.flows.elsewhere import Elsewhere
from tests.manifests.s3_proxy import error, flipped_request
from warmcast.flows.chunks import Lanes
from warmcast.flows.errors import SourceChanged
from warmcast.flows.steps import abandoned
from warmcast.flows.steps.collect import collect
from warmcast.flows.steps.journal import Pace, acquire, read_journal
from warmcast.flows.steps.known import Known, Recalling
from warmcast.flows.steps.measure import measure
from warmcast.flows.steps.mirror import Mirrored, Streaming, stream_file
from warmcast.flows.steps.transfer import transfer_key
from warmcast.manifests import sha256 as sha256_module
from warmcast.manifests.checksum import crc32c
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, IntegrityError, StoreFull
from warmcast.manifests.origin import Origin, blob_key

CHUNK = 5 << 20  # the smallest part that S3 takes
LARGE = os.urandom(CHUNK) * 2 + os.urandom(70_001)
PACE = Pace(chunk_nbytes=CHUNK, connections=2, lanes=2, beat=0.05, silent=0.5)
FAST = replace(PACE, chunk_nbytes=64 << 10, connections=3, lanes=3)
SMALL_CHUNKS = os.urandom((64 << 10) * 20 + 77)


@pytest.fixture
def origin(store_url: str) -> Iterator[Origin]:
    with Origin.open(store_url) as opened:
        yield opened


@pytest.fixture
def folder_origin(file_url: str) -> Iterator[Origin]:
    with Origin.open(file_url) as opened:
        yield opened


def upstream(tmp_path: Path, data: bytes, tells: str = "version", **options) -> Elsewhere:
    folder = tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "x.bin").write_bytes(data)
    return Elsewhere(folder, tells, **options)


def stream(
    origin: Origin,
    source: Elsewhere,
    pace: Pace,
    *,
    file=None,
    lanes=None,
    tick=lambda _: None,
    deadline=None,
) -> Mirrored:
    deadline = deadline or Deadline.after(60)
    file = file or source.file("x.bin")
    recalling = Recalling(source, Known(origin, source.name))

    def recall():
        found = recalling.recall(file, deadline, weights=False)
        return found and found.measured

    return stream_file(
        Streaming(origin, source, lanes or Lanes(pace.lanes), pace),
        file,
        (),
        deadline,
        tick,
        recall=recall,
        remember=lambda measured: recalling.remember(file, measured, deadline),
    )


def plainly(data: bytes):
    def read(offset, view):
        view[:] = data[offset : offset + len(view)]

    return measure("x.bin", len(data), (), read, lambda _: None)


def blob(origin: Origin, sha256: str, size: int, deadline: Deadline) -> bytes:
    buffer = bytearray(size)
    origin.read_blob(sha256, 0, memoryview(buffer), deadline)
    return bytes(buffer)


def leftovers(origin: Origin, deadline: Deadline) -> list[str]:
    """What transfers have left behind."""
    begun = [item.token for item in origin.store.begun_parts(deadline)]
    return [info.key for info in origin.store.list("transfers/", deadline)] + begun


@pytest.mark.parametrize("tells", ["sha256", "version crc32c"])
def test_a_file_is_streamed(origin, tmp_path, deadline, tells):
    source = upstream(tmp_path, LARGE, tells)
    ticks: list[int] = []
    found = stream(origin, source, PACE, tick=ticks.append)
    assert found.measured == plainly(LARGE)
    assert found.moved
    assert sum(ticks) == 2 * len(LARGE)
    assert source.read_of("x.bin") == len(LARGE)
    assert blob(origin, found.file.sha256, len(LARGE), deadline) == LARGE
    assert leftovers(origin, deadline) == []


def test_a_file_that_is_there_is_not_sent_again(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS, "sha256")
    first = stream(folder_origin, source, FAST)
    ticks: list[int] = []
    again = stream(folder_origin, source, FAST, tick=ticks.append)
    assert (again.measured, again.moved) == (first.measured, False)
    assert sum(ticks) == 2 * len(SMALL_CHUNKS)
    assert source.read_of("x.bin") == len(SMALL_CHUNKS)  # the second time, of the origin
    # Its bytes are wrong: the name is all that it has.
    key = blob_key(first.file.sha256)
    folder_origin.store.delete(key, deadline)
    wrong = bytes(len(SMALL_CHUNKS))
    folder_origin.store.upload(key, io.BytesIO(wrong), len(wrong), crc32c(wrong), deadline)
    assert stream(folder_origin, source, FAST).moved
    assert blob(folder_origin, first.file.sha256, len(wrong), deadline) == SMALL_CHUNKS


@pytest.mark.parametrize("what", ["sha256", "crc32c"])
@pytest.mark.parametrize("size", [1000, len(SMALL_CHUNKS)], ids=["small", "chunks"])
def test_a_wrong_checksum_is_refused(folder_origin, tmp_path, deadline, what, size):
    source = upstream(tmp_path, SMALL_CHUNKS[:size], "sha256 crc32c")
    wrong = {"sha256": "ab" * 32, "crc32c": 7}[what]
    file = replace(source.file("x.bin"), **{what: wrong})
    with pytest.raises(IntegrityError, match=r"x\.bin: expected .* as the upstream publishes"):
        stream(folder_origin, source, FAST, file=file)
    assert list(folder_origin.store.list("", deadline)) == []
    assert leftovers(folder_origin, deadline) == []


def test_chunks_in_flight_are_bounded(folder_origin, tmp_path):
    source = upstream(tmp_path, SMALL_CHUNKS)
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.bin").write_bytes(SMALL_CHUNKS[::-1])
    second = Elsewhere(other, log=tmp_path / "log")
    lanes = Lanes(2)
    pace = replace(FAST, connections=8)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(stream, folder_origin, one, pace, lanes=lanes) for one in (source, second)
        ]
        assert all(future.result().moved for future in futures)
    assert source.most_reading + second.most_reading <= 4
    assert len(lanes._buffers) <= 2
    assert sum(map(len, lanes._buffers)) <= 2 * pace.chunk_nbytes


MEMORY = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from tests.flows.elsewhere import Elsewhere
from tests.flows.test_transfer import FAST, stream
from warmcast.manifests.origin import Origin

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

url, folder = sys.argv[1:]
pace = replace(FAST, chunk_nbytes=1 << 20, connections=8, lanes=4)
with Origin.open(url) as origin:
    source = Elsewhere(Path(folder))
    stream(origin, source, pace, file=source.file("small"))
    before = peak()
    assert stream(origin, source, pace).moved
print(peak() - before)
"""


def test_memory_is_that_of_the_lanes(folder_origin, tmp_path):
    source = upstream(tmp_path, b"")
    os.truncate(source.folder / "x.bin", 48 << 20)
    (source.folder / "small").write_bytes(bytes(2 << 20))
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, folder_origin.url, str(source.folder)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(ended.stdout) < 12 << 20


# Processes that are killed, stopped, and in each other's way

CHILD = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from tests.flows.elsewhere import Elsewhere
from tests.flows.test_transfer import FAST, stream
from warmcast.manifests.origin import Origin

url, folder, tells, at, number = sys.argv[1:]

def on_read(reads):
    if reads == int(at):
        print("there", flush=True)
        if number == "wait":
            sys.stdin.readline()
        else:
            os.kill(os.getpid(), int(number))

looks = 0

def tick(nbytes):  # first called when it looks whose the transfer is
    global looks
    looks += 1
    if looks == 3 and at == "never":
        print("watching", flush=True)

with Origin.open(url) as origin:
    source = Elsewhere(Path(folder), tells, on_read=on_read if at != "never" else lambda _: None)
    found = stream(origin, source, FAST, tick=tick)
    print(found.file.sha256, found.moved)
"""


@contextmanager
def child(
    origin: Origin, source: Elsewhere, at: int | str = "never", number: int | str = 0
) -> Iterator[subprocess.Popen[str]]:
    """Streams in a process of its own, to which something happens at its read ``at``."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, origin.url, str(source.folder), source.tells, str(at),
         str(number)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


@pytest.mark.parametrize("tells", ["sha256", "version"])
def test_killed_and_gone_on_with(folder_origin, tmp_path, deadline, tells):
    source = upstream(tmp_path, SMALL_CHUNKS, tells)
    with child(folder_origin, source, 12, signal.SIGKILL) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert list(folder_origin.store.list("blobs/", deadline)) == []
    assert len(leftovers(folder_origin, deadline)) == 2  # the journal and what is begun
    found = stream(folder_origin, source, FAST)
    assert found.measured == plainly(SMALL_CHUNKS)
    again = source.read_of("x.bin") - len(SMALL_CHUNKS)
    assert again <= FAST.connections * FAST.chunk_nbytes
    assert blob(folder_origin, found.file.sha256, len(SMALL_CHUNKS), deadline) == SMALL_CHUNKS
    assert leftovers(folder_origin, deadline) == []


def test_without_the_hash_state_it_is_read_again_but_not_sent(
    folder_origin, tmp_path, deadline, monkeypatch
):
    monkeypatch.setattr(sha256_module, "_functions", lambda: None)

    def on_read(number):
        if number == 10:
            raise ConnectionResetError

    source = upstream(tmp_path, SMALL_CHUNKS, on_read=on_read)
    with pytest.raises(ConnectionResetError):
        stream(folder_origin, source, FAST)
    journal, _ = read_journal(
        folder_origin.store,
        f"transfers/{transfer_key(source, source.file('x.bin'))}.json",
        deadline,
    )
    assert journal.progressed is None
    assert journal.parts
    assert journal.owner == ""
    sent: list[int] = []
    put = folder_origin.store.put_part

    def put_part(token, index, *rest):
        sent.append(index)
        return put(token, index, *rest)

    monkeypatch.setattr(folder_origin.store, "put_part", put_part)
    found = stream(folder_origin, source, FAST)
    assert found.measured == plainly(SMALL_CHUNKS)
    assert not {part.index for part in journal.parts} & set(sent)
    assert len(sent) + len(journal.parts) == 21


SHA256 = hashlib.sha256(SMALL_CHUNKS).hexdigest()


def test_two_processes_transfer_once(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS)
    with child(folder_origin, source, 6, "wait") as first:
        assert line(first) == "there"
        with child(folder_origin, source) as second:
            assert line(second) == "watching"
            first.stdin.write("go on\n")
            first.stdin.flush()
            assert line(first).split() == [SHA256, "True"]
            assert line(second).split() == [SHA256, "False"]
    assert source.read_of("x.bin") == len(SMALL_CHUNKS)
    assert leftovers(folder_origin, deadline) == []


def test_who_waits_takes_over_from_the_dead(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS)
    with child(folder_origin, source, 12, "wait") as first:
        assert line(first) == "there"
        with child(folder_origin, source) as second:
            assert line(second) == "watching"
            first.kill()
            assert line(second).split() == [SHA256, "True"]
    again = source.read_of("x.bin") - len(SMALL_CHUNKS)
    assert again <= FAST.connections * FAST.chunk_nbytes
    assert leftovers(folder_origin, deadline) == []


def test_who_was_taken_for_dead_does_no_harm(gcs_url, tmp_path, deadline):
    """Stopped for long enough to lose its transfer, it finds that another has done it."""
    source = upstream(tmp_path, SMALL_CHUNKS)
    # Not on a disk: who is stopped there may hold the store's lock.
    with Origin.open(gcs_url) as origin, child(origin, source, 12, signal.SIGSTOP) as first:
        assert line(first) == "there"
        with child(origin, source, 4, "wait") as second:
            assert line(second) == "there"  # it took over
            first.send_signal(signal.SIGCONT)
            assert select.select([first.stdout], [], [], 0.3)[0] == []  # and is waited for now
            second.stdin.write("go on\n")
            second.stdin.flush()
            assert line(second).split() == [SHA256, "True"]
            assert line(first).split() == [SHA256, "False"]
        assert blob(origin, SHA256, len(SMALL_CHUNKS), deadline) == SMALL_CHUNKS
        assert leftovers(origin, deadline) == []


def test_waiting_ends_by_its_deadline(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS)
    key = transfer_key(source, source.file("x.bin"))
    pace = replace(FAST, silent=60)
    size = len(SMALL_CHUNKS)
    store = folder_origin.store
    lease = acquire(store, key, "x.bin", size, pace, deadline, lambda _: None)
    with pytest.raises(DeadlineExceeded, match=r"waiting for another deploy to transfer x\.bin"):
        stream(folder_origin, source, pace, deadline=Deadline.after(0.3))
    assert source.reads == []
    lease.finish(deadline)
    assert stream(folder_origin, source, pace).moved


def test_what_was_begun_and_went_is_begun_anew(store_url, tmp_path, deadline):
    """A bucket's life cycle rule, or a collector, ends what nobody went on with."""

    with Origin.open(store_url) as origin:
        source = left_in_the_middle(origin, tmp_path)
        (begun,) = origin.store.begun_parts(deadline)
        origin.store.abort_parts(begun.token, deadline)
        assert stream(origin, source, PACE).measured == plainly(LARGE)
        assert leftovers(origin, deadline) == []


def test_a_damaged_journal_is_replaced(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS)
    path = f"transfers/{transfer_key(source, source.file('x.bin'))}.json"
    folder_origin.store.create(path, b'{"schema_version":2}', deadline)
    assert stream(folder_origin, source, FAST).moved
    assert leftovers(folder_origin, deadline) == []


def test_other_bytes_than_were_sent_are_found(folder_origin, tmp_path, monkeypatch):
    """The upstream says that nothing changed; what was sent before it broke says otherwise."""
    monkeypatch.setattr(sha256_module, "_functions", lambda: None)  # all is read again

    def on_read(number):
        if number == 10:
            raise ConnectionResetError

    source = upstream(tmp_path, SMALL_CHUNKS, on_read=on_read)
    file = source.file("x.bin")
    with pytest.raises(ConnectionResetError):
        stream(folder_origin, source, FAST)
    times = (tmp_path / "elsewhere/x.bin").stat()
    (tmp_path / "elsewhere/x.bin").write_bytes(SMALL_CHUNKS[::-1])
    os.utime(tmp_path / "elsewhere/x.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(SourceChanged, match="other bytes at"):
        stream(folder_origin, source, FAST, file=file)


# Origins that are full, or refuse


def test_a_full_bucket(proxy, s3_url, tmp_path, deadline):
    source = upstream(tmp_path, LARGE)
    with Origin.open(s3_url) as origin:
        proxy.fail(
            b"PUT /warmcast-tests/" + s3_url.rpartition("/")[2].encode() + b"/transfers/staged",
            error("507 Insufficient Storage", "InsufficientStorage"),
        )
        with pytest.raises(StoreFull, match="free space, or raise the quota"):
            stream(origin, source, PACE)
        assert list(origin.store.list("blobs/", deadline)) == []
        assert stream(origin, source, PACE).measured == plainly(LARGE)
        assert leftovers(origin, deadline) == []


def test_a_full_disk(folder_origin, tmp_path, deadline):
    source = upstream(tmp_path, SMALL_CHUNKS)
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
    ended = subprocess.run(
        [sys.executable, "-c", script + CHILD, folder_origin.url, str(source.folder), "version",
         "never", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "warmcast.manifests.errors.StoreFull: file:///" in ended.stderr.splitlines()[-1]
    assert "free space, or raise the quota" in ended.stderr.splitlines()[-1]
    assert list(folder_origin.store.list("blobs/", deadline)) == []
    first = source.read_of("x.bin")
    assert stream(folder_origin, source, FAST).measured == plainly(SMALL_CHUNKS)
    assert source.read_of("x.bin") < first + len(SMALL_CHUNKS)  # what had room was kept
    assert leftovers(folder_origin, deadline) == []


def test_a_part_that_is_damaged_on_its_way_is_sent_again(proxy, s3_url, tmp_path, deadline):
    source = upstream(tmp_path, LARGE)
    with Origin.open(s3_url) as origin:
        parts = f"PUT /{s3_url.removeprefix('s3://')}/transfers/staged".encode()
        proxy.fail(parts, flipped_request)
        assert stream(origin, source, PACE).measured == plainly(LARGE)
        assert source.read_of("x.bin") == len(LARGE)


# What nobody goes on with


def left_in_the_middle(origin, tmp_path, pace=PACE) -> Elsewhere:
    def on_read(number):
        if number == 3:
            raise ConnectionResetError

    source = upstream(tmp_path, LARGE, on_read=on_read)
    with pytest.raises(ConnectionResetError):
        stream(origin, source, pace)
    return source


def test_what_was_left_is_gone_on_with(origin, tmp_path, deadline):
    source = left_in_the_middle(origin, tmp_path, replace(PACE, connections=1))
    found = stream(origin, source, PACE)
    assert found.measured == plainly(LARGE)
    assert source.read_of("x.bin") == len(LARGE) + len(LARGE) % CHUNK  # what failed, again
    assert blob(origin, found.file.sha256, len(LARGE), deadline) == LARGE
    assert leftovers(origin, deadline) == []


def test_what_was_left_is_collected(origin, tmp_path, deadline, monkeypatch):
    monkeypatch.setattr(abandoned, "UNFINISHED", 0)
    source = left_in_the_middle(origin, tmp_path)
    origin.store.begin_parts(None, deadline)  # by who was killed before it wrote a journal
    before = leftovers(origin, deadline)
    assert collect(origin, 3600, 5, deadline, dry_run=False).deleted_transfers == 0
    assert collect(origin, 0, 5, deadline, dry_run=True).deleted_transfers == 2
    assert leftovers(origin, deadline) == before
    found = collect(origin, 0, 5, deadline, dry_run=False)
    assert found.deleted_transfers == 2
    assert "and 2 transfers that nobody went on with" in found.summary()
    assert leftovers(origin, deadline) == []
    assert stream(origin, source, PACE).moved


def test_who_is_collected_alive_begins_anew(folder_origin, tmp_path, deadline):
    def on_read(number):
        if number == 10:
            collect(folder_origin, 0, 5, deadline, dry_run=False)

    source = upstream(tmp_path, SMALL_CHUNKS, on_read=on_read)
    found = stream(folder_origin, source, FAST)
    assert found.measured == plainly(SMALL_CHUNKS)
    assert leftovers(folder_origin, deadline) == []
