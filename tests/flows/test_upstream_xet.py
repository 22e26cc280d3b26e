"""Reading through Xet: the real library over its local storage, and what happens when it stops."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.flows.hub import XET_UPLOAD, Hub, Storage, no_login, sha256
from tests.manifests import s3_proxy as fault
from warmcast.flows.upstreams.hf import HfUpstream
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded

REPO = "org/model"
PATH = "model.safetensors"
WEIGHTS = os.urandom(1 << 20) * 3 + b"the end"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The weights in a storage of Xet: its address, and their hash."""
    folder = tmp_path_factory.mktemp("xet")
    (folder / "weights").write_bytes(WEIGHTS)
    cas = f"local://{folder}/cas"
    done = subprocess.run(
        [sys.executable, "-P", "-c", XET_UPLOAD, cas, folder / "weights"],
        env={**os.environ, "HF_HOME": str(folder)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return cas, done.stdout.strip()


@pytest.fixture
def hub(monkeypatch, tmp_path, stored):
    no_login(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    storage = Storage()
    opened = Hub(storage)
    opened.cas, opened.xet[sha256(WEIGHTS)] = stored
    opened.commit(REPO, {PATH: WEIGHTS, "config.json": b"{}"})
    monkeypatch.setenv("HF_ENDPOINT", opened.url)
    yield opened
    opened.close()
    storage.close()


@pytest.fixture
def opened(hub, deadline):
    held = []

    def run(options="", xet_from=1 << 20):
        held.append(HfUpstream(f"hf://{REPO}{options}", deadline, xet_from=xet_from))
        return held[-1]

    yield run
    for upstream in held:
        upstream.close()


@pytest.fixture
def reader(opened, deadline):
    upstream = opened()
    files = {file.path: file for file in upstream.files(deadline)}
    found = upstream.reader(files[PATH], deadline)
    yield found, upstream
    found.close()


def read(reader, deadline, offset=0, length=None):
    data = bytearray(reader.size - offset if length is None else length)
    reader.read_into(offset, memoryview(data), deadline)
    return bytes(data)


def over_https(hub):
    """Whether the storage of LFS was asked for bytes, besides the first one."""
    return any("bytes=0-0" not in r.headers.get("range", "") for r in hub.storage.asked)


class TestThroughXet:
    @pytest.fixture
    def reader(self, opened, deadline):
        upstream = opened()
        files = {file.path: file for file in upstream.files(deadline)}
        return upstream.reader(files[PATH], deadline), upstream

    def test_ranges(self, hub, reader, deadline):
        found, upstream = reader
        assert read(found, deadline) == WEIGHTS
        assert read(found, deadline, 1_234_567, 70_001) == WEIGHTS[1_234_567:][:70_001]
        assert read(found, deadline, len(WEIGHTS) - 7) == b"the end"
        assert read(found, deadline, len(WEIGHTS)) == b""
        assert upstream.xet.failure == ""
        assert not hub.storage.requests
        assert sum("xet-read-token" in request.path for request in hub.asked) == 1

    def test_several_at_once(self, hub, reader, deadline):
        found, _ = reader
        offsets = range(0, len(WEIGHTS), 100_000)
        with ThreadPoolExecutor(8) as pool:
            pieces = list(
                pool.map(
                    lambda o: read(found, deadline, o, min(100_000, len(WEIGHTS) - o)), offsets
                )
            )
        assert b"".join(pieces) == WEIGHTS
        assert not hub.storage.requests

    def test_the_child_has_no_token_of_the_hub(self, hub, opened, monkeypatch, deadline):
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hf_secret of another kind")
        hub.tokens = {"hf_secret"}
        upstream = opened()
        files = {file.path: file for file in upstream.files(deadline)}
        read(upstream.reader(files[PATH], deadline), deadline)
        process = Path(f"/proc/{upstream.xet.pid}")
        assert b"hf_secret" not in process.joinpath("environ").read_bytes()
        assert b"hf_secret" not in process.joinpath("cmdline").read_bytes()

    def test_closing_ends_the_child(self, reader, deadline):
        found, upstream = reader
        read(found, deadline)
        pid = upstream.xet.pid
        upstream.close()
        assert not Path(f"/proc/{pid}").exists()
        buffer = memoryview(bytearray(9))
        assert upstream.xet.read_into("0" * 64, 9, 0, buffer, deadline) == 0
        assert upstream.xet.pid is None


class TestNotThroughXet:
    @pytest.mark.parametrize("how", ["option", "variable", "small"])
    def test_it_is_off(self, hub, opened, monkeypatch, deadline, how):
        if how == "variable":
            monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        upstream = opened(
            "?xet=no" if how == "option" else "", xet_from=len(WEIGHTS) + (how == "small")
        )
        files = {file.path: file for file in upstream.files(deadline)}
        assert read(upstream.reader(files[PATH], deadline), deadline) == WEIGHTS
        assert upstream.xet is None or upstream.xet.pid is None
        assert over_https(hub)


class TestWhenItStops:
    def test_a_child_that_stands_still(self, hub, reader, deadline, caplog):
        found, upstream = reader
        assert read(found, deadline, 0, 1000) == WEIGHTS[:1000]
        pid = upstream.xet.pid
        os.kill(pid, signal.SIGSTOP)
        upstream.xet.patience = 0.5
        assert read(found, deadline) == WEIGHTS
        assert "no byte for 0." in upstream.xet.failure
        assert "Xet is off, reading over HTTPS" in caplog.text
        assert over_https(hub)
        assert not Path(f"/proc/{pid}").exists()
        assert read(found, deadline) == WEIGHTS
        assert upstream.xet.pid is None, "it stays off"

    def test_a_child_that_is_killed(self, hub, reader, deadline):
        found, upstream = reader
        read(found, deadline, 0, 1000)
        os.kill(upstream.xet.pid, signal.SIGKILL)
        assert read(found, deadline) == WEIGHTS
        assert over_https(hub)

    def test_a_storage_that_answers_nothing(self, hub, reader, deadline):
        found, upstream = reader
        upstream.xet.patience = 0.5
        with socket.create_server(("127.0.0.1", 0)) as silent:
            hub.cas = f"http://127.0.0.1:{silent.getsockname()[1]}"
            assert read(found, deadline) == WEIGHTS
        assert "no byte for" in upstream.xet.failure
        assert over_https(hub)

    @pytest.mark.parametrize("how", ["no such file", "no storage", "no address"])
    def test_one_that_does_not_have_it(self, hub, reader, deadline, tmp_path, how):
        found, upstream = reader
        upstream.xet.patience = 0.5
        if how == "no such file":
            hub.cas = f"local://{tmp_path}/empty"
        else:
            hub.cas = "http://127.0.0.1:9" if how == "no storage" else "nonsense://"
        assert read(found, deadline) == WEIGHTS
        assert upstream.xet.failure
        assert over_https(hub)

    def test_a_hub_that_gives_no_token_for_it(self, hub, reader, deadline):
        found, upstream = reader
        hub.fail(b"GET /api/models/org/model/xet", fault.answer("403 Forbidden"))
        assert read(found, deadline) == WEIGHTS
        assert "403" in upstream.xet.failure

    def test_time_remains_for_reading_without_it(self, hub, opened, deadline):
        upstream = opened("?xet_patience=3600")
        files = {file.path: file for file in upstream.files(deadline)}
        found = upstream.reader(files[PATH], deadline)
        read(found, deadline, 0, 1000)
        os.kill(upstream.xet.pid, signal.SIGSTOP)
        assert read(found, Deadline.after(3)) == WEIGHTS
        assert over_https(hub)

    def test_the_deadline_is_none_of_its_failures(self, opened, deadline):
        upstream = opened()
        files = {file.path: file for file in upstream.files(deadline)}
        found = upstream.reader(files[PATH], deadline)
        read(found, deadline, 0, 1000)
        with pytest.raises(DeadlineExceeded, match="Xet"):
            read(found, Deadline.after(0))
        assert upstream.xet.failure == ""
        assert read(found, deadline) == WEIGHTS

    def test_readers_at_once_fall_back_together(self, hub, reader, deadline, caplog):
        found, upstream = reader
        read(found, deadline, 0, 1000)
        os.kill(upstream.xet.pid, signal.SIGSTOP)
        upstream.xet.patience = 0.5
        with ThreadPoolExecutor(6) as pool:
            assert set(pool.map(lambda _: read(found, deadline), range(6))) == {WEIGHTS}
        assert caplog.text.count("Xet is off") == 1

    def test_a_killed_parent_leaves_no_child(self, hub, tmp_path, deadline):
        code = (
            "import sys\n"
            "from warmcast.flows.upstreams.hf import HfUpstream\n"
            "from warmcast.manifests.deadline import Deadline\n"
            "deadline = Deadline.after(60)\n"
            "upstream = HfUpstream('hf://org/model', deadline, xet_from=1)\n"
            "file = upstream.files(deadline)[1]\n"
            "upstream.reader(file, deadline).read_into(0, memoryview(bytearray(9)), deadline)\n"
            "print(upstream.xet.pid, flush=True)\n"
            "sys.stdin.read()\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent:
            pidfd = os.pidfd_open(int(parent.stdout.readline()))
            parent.kill()
        try:
            assert select.select([pidfd], [], [], deadline.remaining())[0]
        finally:
            os.close(pidfd)
