"""Deploys that are killed, interrupted, raced, starved or lied to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.errors import SourceChanged, WorkFolderFull
from warmcast.flows.progress import Silent
from warmcast.flows.run import deploy
from warmcast.flows.steps.verify import verify
from warmcast.flows.workfolder import WorkFolder
from warmcast.manifests import Origin, Ref
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import (
    DeadlineExceeded,
    IntegrityError,
    PreconditionFailed,
    StoreError,
)

# Deploys in a process of its own, and sends it a signal when a stage is `count` steps in.
SCRIPT = """
import os, sys
from contextlib import contextmanager
from pathlib import Path
import warmcast.flows.deploy_cli as cli
from warmcast.manifests.command import main

stage_wanted, count, number, *words = sys.argv[1:]

class Saboteur:
    stage_now, steps = "", 0
    @contextmanager
    def stage(self, what, total):
        self.stage_now, self.steps = what, 0
        self.advance(0)
        yield
        self.stage_now, self.steps = what + " ended", 0
        self.advance(0)
    def advance(self, nbytes):
        self.steps += 1
        if self.stage_now == stage_wanted and self.steps == int(count):
            os.kill(os.getpid(), int(number))
    def note(self, line):
        pass

cli.for_terminal = Saboteur
main(words)
"""

STAGES = [
    ("convert", 2),
    ("convert ended", 1),
    ("read and upload", 3),
    ("read and upload ended", 1),
]


def sabotaged(stage, count, number, source, url, work):
    words = ["deploy", source, "--origin", url, "--ref", "m@a", "--work", work]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, stage, str(count), str(int(number)), *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def files_below(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def whole(url, manifest, deadline):
    with Origin.open(url) as origin:
        assert verify(origin, manifest, deadline) == []


@pytest.fixture
def pickles(source):
    state = {f"layers.{i}.w": torch.randn(50, 50) for i in range(8)}
    torch.save(state, source / "pytorch_model.bin")
    return source


@pytest.fixture
def safetensors(source):
    save_file({"w": torch.randn(50, 50)}, source / "model.safetensors")
    return source


@pytest.mark.parametrize(("stage", "count"), STAGES)
def test_killed_and_resumed(pickles, file_url, work, deadline, stage, count):
    ended = sabotaged(stage, count, signal.SIGKILL, pickles, file_url, work)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with Origin.open(file_url) as origin:
        assert origin.ref(Ref.parse("m@a"), deadline) is None
    result = deploy(pickles, file_url, "m@a", work=work, deadline=deadline)
    assert result.changed
    whole(file_url, result.manifest, deadline)
    store = Path(file_url.removeprefix("file://"))
    assert [p.name for p in files_below(store / ".tmp")] in ([], ["lock"])
    if "convert" in stage or result.moved:  # a folder is swept when one is needed again
        assert not files_below(work)


@pytest.mark.parametrize(
    ("stage", "count", "number"),
    [(*STAGES[0], signal.SIGTERM), (*STAGES[2], signal.SIGTERM), (*STAGES[2], signal.SIGINT)],
)
def test_interrupted(pickles, file_url, work, deadline, stage, count, number):
    ended = sabotaged(stage, count, number, pickles, file_url, work)
    assert ended.returncode == 130
    assert ended.stderr == "warmcast: interrupted; what was begun can be run again\n"
    assert not list(work.iterdir())
    store = Path(file_url.removeprefix("file://"))
    assert [p.name for p in files_below(store / ".tmp")] in ([], ["lock"])
    with Origin.open(file_url) as origin:
        assert origin.ref(Ref.parse("m@a"), deadline) is None


class At(Silent):
    """Does something once, at the first step of a stage, or when the stage begins."""

    def __init__(self, action, *, begin=False):
        self._action, self._begin = action, begin
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, what, total):
        if self._begin and what == "read and upload":
            self._once()
        yield

    def advance(self, nbytes):
        if not self._begin and nbytes:
            self._once()

    def _once(self):
        with self._lock:
            action, self._action = self._action, lambda: None
        action()


def both(first, second):
    """Run two deploys that meet when each knows the ref but neither has moved it."""
    barrier = threading.Barrier(2, timeout=30)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(deploy, *arguments, progress=At(barrier.wait, begin=True))
            for arguments in (first, second)
        ]
        return [future.exception() or future.result() for future in futures]


def test_two_deploys_of_one_ref(safetensors, file_url, tmp_path, deadline):
    other = tmp_path / "other"
    other.mkdir()
    save_file({"w": torch.zeros(3)}, other / "model.safetensors")
    results = both((safetensors, file_url, "m@a"), (other, file_url, "m@a"))
    (lost,) = [r for r in results if isinstance(r, Exception)]
    (won,) = [r for r in results if not isinstance(r, Exception)]
    assert isinstance(lost, PreconditionFailed)
    assert "another deploy moved it" in str(lost)
    with Origin.open(file_url) as origin:
        assert origin.resolve("m@a", deadline) == won.manifest


def test_two_deploys_of_the_same_content(safetensors, file_url, deadline):
    results = both((safetensors, file_url, "m@a"), (safetensors, file_url, "m@a"))
    assert sorted(result.changed for result in results) == [False, True]
    assert results[0].manifest == results[1].manifest
    whole(file_url, results[0].manifest, deadline)


def append(path):
    with path.open("ab") as file:
        file.write(b"x")


def touch(path):
    os.utime(path, ns=(1, 1))


def shorten(path):
    os.truncate(path, 100)


def replace(path):
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


@pytest.mark.parametrize("change", [append, touch, shorten, replace])
def test_source_that_changes_while_it_is_read(source, file_url, deadline, change):
    # The only file: its first step is the pass that measures it.
    for path in source.iterdir():
        path.unlink()
    path = source / "model.safetensors"
    save_file({"w": torch.randn(50, 50)}, path)
    with pytest.raises(SourceChanged, match=r"model\.safetensors"):
        deploy(source, file_url, "m@a", progress=At(lambda: change(path)))
    with Origin.open(file_url) as origin:
        assert origin.ref(Ref.parse("m@a"), deadline) is None


def test_source_that_changes_in_secret(source, file_url, deadline):
    """Same size, same time, same inode: the checksum that goes with the upload finds it."""
    for path in source.iterdir():
        path.unlink()
    path = source / "model.safetensors"
    save_file({"w": torch.randn(50, 50)}, path)
    times = path.stat()

    def change():
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    with pytest.raises(IntegrityError):
        deploy(source, file_url, "m@a", progress=At(change))
    with Origin.open(file_url) as origin:
        assert origin.ref(Ref.parse("m@a"), deadline) is None
        assert not list(origin.store.list("blobs/", deadline))


def limited(nbytes, source, url, work):
    """Deploy in a process that may write no file longer than ``nbytes``, as on a full disk."""
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, {nbytes}))
from warmcast.manifests.command import main
main(sys.argv[1:])
"""
    words = ["deploy", source, "--origin", url, "--ref", "m@a", "--work", work]
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_store_full(safetensors, file_url, work, deadline):
    ended = limited(5000, safetensors, file_url, work)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("warmcast: file:///")
    assert "free space" in last
    store = Path(file_url.removeprefix("file://"))
    assert [p.name for p in files_below(store / ".tmp")] in ([], ["lock"])
    result = deploy(safetensors, file_url, "m@a", work=work)
    assert "model.safetensors" in result.moved
    whole(file_url, result.manifest, deadline)


def test_work_folder_full(pickles, file_url, work):
    ended = limited(50_000, pickles, file_url, work)
    assert ended.returncode == 1
    assert "converting pytorch_model.bin" in ended.stderr.splitlines()[-1]
    assert "--work" in ended.stderr.splitlines()[-1]
    assert not list(work.iterdir())


def test_work_folder_too_small_is_known_before(work):
    with WorkFolder(work) as folder, pytest.raises(WorkFolderFull, match="free; free space"):
        folder.need(1 << 60)


def test_work_folder_in_use_is_not_swept(work):
    with WorkFolder(work) as first, WorkFolder(work) as second:
        kept = first.part()
        second.part()
        assert kept.is_dir()
    assert not list(work.iterdir())


def test_deadline(safetensors, file_url):
    with pytest.raises(DeadlineExceeded):
        deploy(safetensors, file_url, "m@a", deadline=Deadline.after(0))


def test_store_that_is_a_file(safetensors, tmp_path):
    (tmp_path / "store").write_bytes(b"")
    with pytest.raises(StoreError, match=r"store.*expected folders above it"):
        deploy(safetensors, str(tmp_path / "store"), "m@a")
