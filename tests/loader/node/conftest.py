"""What the tests of nodes share: registries, origins and fleets, a module's and a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.loader.node.fleet import Fleet, Valve
from warmcast.infra.servers import Seaweed, Valkey, valkey
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores import http


@pytest.fixture(scope="module")
def nodes_registry() -> Iterator[Valkey]:
    """A registry with no nodes but a module's own."""
    with valkey(Deadline.after(30)) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, nodes_registry: Valkey) -> Iterator[Fleet]:
    """A fleet of a module, with an origin in a folder: two nodes, of which no test harms any."""
    folder = tmp_path_factory.mktemp("f")
    fleet = Fleet(folder, (folder / "origin").as_uri(), nodes_registry.url)
    try:
        fleet.start("a", "b")
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def registry() -> Iterator[Valkey]:
    """A registry of a test's own."""
    with valkey(Deadline.after(30)) as server:
        yield server


@pytest.fixture
def fleet(tmp_path: Path, registry: Valkey) -> Iterator[Fleet]:
    """A fleet of a test's own, without agents yet, and with an origin in a folder."""
    made = Fleet(tmp_path / "f", (tmp_path / "origin").as_uri(), registry.url)
    yield made
    made.close()


@pytest.fixture
def valve(seaweed_server: Seaweed, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valve]:
    """Before the object server, for this process and for :func:`far_fleet`'s agents."""
    parts = urlsplit(seaweed_server.url)
    opened = Valve((parts.hostname or "", parts.port or 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", opened.url)
    # Backoff stays; that it takes its time is not what is tested.
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)
    yield opened
    opened.close()


@pytest.fixture
def far_fleet(
    tmp_path: Path, registry: Valkey, seaweed_server: Seaweed, s3_url: str, valve: Valve
) -> Iterator[Fleet]:
    """A fleet of a test's own, without agents yet, and with an origin behind the valve."""
    env = {**seaweed_server.env, "AWS_ENDPOINT_URL": valve.url}
    made = Fleet(tmp_path / "f", s3_url, registry.url, env)
    yield made
    made.close()
