"""What runs only on GPUs: a test says how many it needs; elsewhere it is skipped, saying so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_workers import Fleet, deploy_model
from tests.loader.faults.conftest import deployed, registry, scene  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    count = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and marker.args[0] > count:
            reason = f"needs {marker.args[0]} GPUs, this machine has {count}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An origin with ``big@prod``: 64 layers, 2 GiB in bfloat16."""
    root = tmp_path_factory.mktemp("gpu")
    return deploy_model(root / "checkpoint", root / "origin")


@pytest.fixture
def fleet(origin: str, valkey_url: str, tmp_path: Path) -> Iterator[Fleet]:
    """Starts workers, and ends those that a test leaves."""
    with Fleet(origin, valkey_url, tmp_path) as fleet:
        yield fleet
