"""Pickles made to harm: none runs, none eats the machine, and each error names the file."""

from __future__ import annotations

import io
import json
import os
import pickle
import select
import subprocess
import sys
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from warmcast.flows.convert import process
from warmcast.flows.convert.archive import Checksums
from warmcast.flows.convert.child import ALLOWANCE
from warmcast.flows.convert.options import ConvertOptions
from warmcast.flows.convert.pickle import open_pickles
from warmcast.flows.convert.tensors import Files
from warmcast.flows.errors import ConversionFailed, InvalidCheckpoint, UnsafePickle
from warmcast.flows.local import LocalFile
from warmcast.flows.run import deploy
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded


class Call:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def convert(path: Path, tmp_path: Path, deadline: Deadline | None = None):
    out = tmp_path / "out"
    out.mkdir()
    try:
        return process.convert(
            "pickle",
            [LocalFile.of("sub/model.bin", path)],
            out,
            ConvertOptions(),
            deadline=deadline or Deadline.after(60),
            tick=lambda _: None,
        )
    finally:
        assert {p.name for p in tmp_path.iterdir()} <= {"out", "model.bin", "marker", "fifo"}


def load(path: Path):
    """What the child does, short of writing, in this process."""
    source = process.source_of(LocalFile.of("sub/model.bin", path))
    with Files([source]) as files, Checksums() as checksums:
        opened = open_pickles(files, [0], checksums)
        checksums.result()
    return {tensor.name for tensor in opened.tensors}


@pytest.fixture
def marker(tmp_path):
    """A file that a pickle would create if it ran."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda m: Call(os.system, f"touch {m}"), r"posix\.system"),
        (lambda m: Call(eval, f"open({str(m)!r}, 'w')"), "eval"),
        (lambda m: [Call(torch.load, str(m))], r"torch\.serialization\.load"),
        (lambda m: {"deep": Call(getattr, Call(eval, "1"), "real")}, "getattr"),
    ],
)
def test_forbidden_globals(tmp_path, marker, make, name):
    torch.save({"w": torch.ones(2), "x": make(marker)}, tmp_path / "model.bin")
    with pytest.raises(UnsafePickle, match=rf"sub/model\.bin: .*forbidden global '{name}'"):
        load(tmp_path / "model.bin")


def test_nothing_runs_in_the_child_either(tmp_path, marker):
    torch.save({"x": Call(os.system, f"touch {marker}")}, tmp_path / "model.bin")
    with pytest.raises(UnsafePickle, match=r"sub/model\.bin: .*forbidden global 'posix\.system'"):
        convert(tmp_path / "model.bin", tmp_path)


def test_forbidden_global_in_the_old_format(tmp_path, marker):
    thing = Call(os.system, f"touch {marker}")
    torch.save({"x": thing}, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafePickle, match=r"posix\.system"):
        load(tmp_path / "model.bin")


def test_plain_pickle(tmp_path, marker):
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Call(os.system, f"touch {marker}")))
    with pytest.raises((UnsafePickle, InvalidCheckpoint), match=r"sub/model\.bin"):
        load(tmp_path / "model.bin")


def test_the_environment_cannot_allow_it(tmp_path, marker, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"x": Call(os.system, f"touch {marker}")}, tmp_path / "model.bin")
    with pytest.raises((UnsafePickle, InvalidCheckpoint)):
        load(tmp_path / "model.bin")


def test_a_module_beside_the_checkpoint_is_not_imported(tmp_path, marker, monkeypatch):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.bin")
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / "torch.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.chdir(tmp_path / "fifo")
    assert convert(tmp_path / "model.bin", tmp_path).files


def test_memory_is_bounded_below_what_the_machine_has(tmp_path):
    torch.save({"x": Call(bytearray, ALLOWANCE + (64 << 20))}, tmp_path / "model.bin")
    with pytest.raises(ConversionFailed, match="bytes of memory"):
        convert(tmp_path / "model.bin", tmp_path)


def saved(state) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def rezip(data: bytes, compression: int) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return target.getvalue()


def test_compressed_archive(tmp_path):
    data = rezip(saved({"w": torch.zeros(1 << 16)}), zipfile.ZIP_DEFLATED)
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match="not compressed"):
        load(tmp_path / "model.bin")


def test_flipped_bit(tmp_path):
    data = bytearray(saved({"w": torch.arange(1000.0)}))
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 77] ^= 4
    (tmp_path / "model.bin").write_bytes(data)
    with pytest.raises(InvalidCheckpoint, match=r"data/0.*CRC-32"):
        load(tmp_path / "model.bin")


def test_archive_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        (tmp_path / "model.bin").write_bytes(saved({"w": torch.ones(3)}))
    finally:
        torch.serialization.set_crc32_options(True)
    assert set(load(tmp_path / "model.bin")) == {"w"}


@pytest.mark.parametrize("legacy", [False, True])
def test_cut_off(tmp_path, legacy):
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(5000)}, buffer, _use_new_zipfile_serialization=not legacy)
    data = buffer.getvalue()
    (tmp_path / "model.bin").write_bytes(data[: len(data) * 9 // 10])
    with pytest.raises(InvalidCheckpoint, match=r"sub/model\.bin"):
        load(tmp_path / "model.bin")


def test_noise(tmp_path):
    (tmp_path / "model.bin").write_bytes(zlib.compress(b"noise" * 100))
    with pytest.raises(InvalidCheckpoint, match=r"sub/model\.bin"):
        load(tmp_path / "model.bin")


def test_deadline_ends_the_child(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.bin")
    with pytest.raises(DeadlineExceeded, match=r"converting sub/model\.bin"):
        convert(tmp_path / "model.bin", tmp_path, Deadline.after(0.01))


def test_the_child_ends_with_its_parent(tmp_path):
    """The child waits on a pipe that nobody writes to; its parent is killed; it must go too."""
    os.mkfifo(tmp_path / "fifo")
    fifo = (tmp_path / "fifo").stat()
    job = {
        "format": "pickle", "out": str(tmp_path), "options": {},
        "sources": [
            {"path": "x", "location": str(tmp_path / "fifo"), "size": 100,
             "mtime_ns": fifo.st_mtime_ns, "inode": fifo.st_ino}
        ],
    }  # fmt: skip
    script = f"""
import json, os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-P", "-m", "warmcast.flows.convert.child"], stdin=subprocess.PIPE
)
child.stdin.write(json.dumps({job!r} | {{"parent": os.getpid()}}).encode())
child.stdin.close()
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        # Opening the other end returns when the child has opened its own: it is at work by then.
        with (tmp_path / "fifo").open("wb"):
            parent.kill()
            ended, _, _ = select.select([child], [], [], 30)
        os.close(child)
        assert ended
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_nothing_is_published(source, file_url, work, marker):
    torch.save({"x": Call(os.system, f"touch {marker}")}, source / "pytorch_model.bin")
    with pytest.raises(UnsafePickle, match=r"pytorch_model\.bin"):
        deploy(source, file_url, "m@a", work=work)
    assert not list(work.iterdir())
    assert not Path(file_url.removeprefix("file://")).exists()


def test_child_speaks_json(tmp_path):
    """What the child prints to standard output is its report, whatever libraries print."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.bin")
    (tmp_path / "out").mkdir()
    source = process.source_of(LocalFile.of("x", tmp_path / "model.bin"))
    job = {
        "format": "pickle", "sources": [asdict(source)], "options": {},
        "out": str(tmp_path / "out"), "parent": os.getpid(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", "warmcast.flows.convert.child"],
        input=json.dumps(job).encode(), capture_output=True, check=True,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == {"progress": 8}
    assert lines[-1]["done"]["files"] == [["w"]]
