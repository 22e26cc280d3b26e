"""The local servers: they answer as themselves, start again where they were, and end with us."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from warmcast.infra.servers import (
    FakeGcs,
    NotStarted,
    Process,
    Valkey,
    fake_gcs,
    seaweed,
    valkey,
)
from warmcast.manifests.deadline import Deadline


def gone(pid: int, deadline: Deadline) -> bool:
    """Whether a process that is no child of ours has ended; waits for it."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], deadline.remaining())[0])
    finally:
        os.close(pidfd)


def test_valkey_starts_again_on_its_port(deadline: Deadline) -> None:
    with valkey(deadline) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("a", "1")
            url, pid = server.url, server.pid
            server.stop()
            with pytest.raises(redis.ConnectionError):
                client.get("a")
            server.restart(deadline)
            assert (server.url, client.get("a")) == (url, None)
            assert server.pid != pid
        folder, pid = server._process.folder, server.pid
        assert folder.exists()
    assert gone(pid, Deadline.after(0))
    assert not folder.exists()


def test_a_paused_server_answers_when_it_goes_on(deadline: Deadline) -> None:
    with valkey(deadline) as server, redis.Redis.from_url(server.url, socket_timeout=0.1) as client:
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        with redis.Redis.from_url(server.url, socket_timeout=30) as patient:
            patient.ping()


def test_a_port_that_is_taken(deadline: Deadline) -> None:
    with valkey(deadline) as other, pytest.raises(NotStarted):
        Valkey(other.port, deadline)


def test_a_server_that_cannot_be_ready(deadline: Deadline) -> None:
    """A stranger listens on the port and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(NotStarted):
        Valkey(stranger.getsockname()[1], deadline)


def test_a_command_that_is_none(
    deadline: Deadline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NotStarted, match="cannot be run"):
        Process(["/no/such/command"], deadline)
    assert "No such file" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_seaweed_leaves_nothing(deadline: Deadline) -> None:
    sockets = set(Path("/tmp").glob("seaweedfs-*"))
    with seaweed(deadline) as server:
        folder, pid = server._process.folder, server.pid
        assert server.make_bucket("a-bucket") == "s3://a-bucket"
        mine = set(Path("/tmp").glob("seaweedfs-*")) - sockets
    assert gone(pid, Deadline.after(0))
    assert not folder.exists()
    port = int(server.url.rpartition(":")[2])
    assert not [path for path in mine if path.stem.endswith(str(port + 10_000)) and path.exists()]


def test_a_bucket_of_fake_gcs_ends_with_it(deadline: Deadline) -> None:
    with fake_gcs(deadline) as server:
        folder, pid = server._process.folder, server.pid
        assert server.make_bucket("a-bucket") == "gs://a-bucket"
        with pytest.raises(ConnectionError, match="409"):
            server.make_bucket("a-bucket")
        with pytest.raises(NotStarted):
            FakeGcs(int(server.url.rpartition(":")[2]), deadline)
    assert gone(pid, Deadline.after(0))
    assert not folder.exists()


def test_servers_end_when_their_owner_is_killed(deadline: Deadline) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        pid, watcher, folder = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    assert gone(int(pid), deadline)
    assert gone(int(watcher), deadline)
    assert not Path(folder.decode()).exists()


_OWNER = """
import sys
from warmcast.infra.servers import valkey
from warmcast.manifests.deadline import Deadline

with valkey(Deadline.after(30)) as server:
    process = server._process
    print(server.pid, process._watcher.pid, process.folder, flush=True)
    sys.stdin.read()
"""
