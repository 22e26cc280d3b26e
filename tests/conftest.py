"""Fixtures that several rooms share: real servers, started once, and an environment of our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.manifests.s3_proxy import Proxy
from warmcast.infra.servers import FakeGcs, Seaweed, Valkey, fake_gcs, seaweed, valkey
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores import ObjectStore, http, open_store

BUCKET = "warmcast-tests"

_SETTINGS = ("API_ENDPOINT_", "AWS_", "CLOUDSDK_", "GCE_", "GOOGLE_", "STORAGE_", "WARMCAST_")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine reaches a test, and none of a test reaches the next."""
    for name in os.environ:
        if name.startswith(_SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "no-gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture
def deadline() -> Deadline:
    """Time enough for one test; a test that needs it to run out makes its own."""
    return Deadline.after(60)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    """A Valkey server; a test that stops it starts it again."""
    with valkey(Deadline.after(30)) as server:
        yield server


@pytest.fixture(scope="session")
def valkey_url(valkey_server: Valkey) -> str:
    """The URL of a Valkey server; use keys of your own."""
    return valkey_server.url


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[Seaweed]:
    """A SeaweedFS server with the bucket ``BUCKET``."""
    with seaweed(Deadline.after(60)) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def s3_url(seaweed_server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix in a bucket, and the environment to reach it."""
    for name, value in seaweed_server.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def proxy(seaweed_server: Seaweed, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the SeaweedFS server, through which this test's requests go."""
    host, _, port = seaweed_server.url.removeprefix("http://").partition(":")
    opened = Proxy((host, int(port)))
    monkeypatch.setenv("AWS_ENDPOINT_URL", opened.url)
    # Backoff stays; that it takes its time is not what is tested.
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGcs]:
    """A fake-gcs-server with the bucket ``BUCKET``."""
    with fake_gcs(Deadline.after(30)) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def gcs_url(gcs_server: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix in a bucket, and the environment to reach it."""
    for name, value in gcs_server.env.items():
        monkeypatch.setenv(name, value)
    return f"gs://{BUCKET}/{uuid4().hex}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A folder that does not exist yet."""
    return (tmp_path / "store").as_uri()


@pytest.fixture(params=["file", "s3", "gcs"])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store, one of each kind."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[ObjectStore]:
    """An empty store, one of each kind."""
    opened = open_store(store_url)
    yield opened
    opened.close()
