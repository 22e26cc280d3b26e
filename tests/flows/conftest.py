"""What the tests of deploying share: checkpoints on disk, and the way back from the origin."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.flows.checkpoints import TORCH, bits, every_dtype
from warmcast.manifests import Manifest, Origin
from warmcast.manifests.deadline import Deadline

Restore = Callable[[Manifest], dict[str, torch.Tensor]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty repository but for its config."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "name": "böse"}))
    (folder / "tokenizer.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder for work folders, which must be empty after each deploy."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def restore(file_url: str, deadline: Deadline) -> Restore:
    """Rebuild a state dict from a manifest and its blobs, as a loader would: ties as views."""

    def rebuild(manifest: Manifest) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        with Origin.open(file_url) as origin:
            for entry in manifest.tensors:
                buffer = bytearray(entry.nbytes)
                sha256 = manifest.file[entry.file].sha256
                origin.read_blob(sha256, entry.begin, memoryview(buffer), deadline)
                dtype, shape = TORCH[entry.dtype], list(entry.shape)
                if entry.dtype == "F4":
                    shape[-1] //= 2
                flat = (
                    torch.frombuffer(buffer, dtype=torch.uint8).clone()
                    if buffer
                    else torch.empty(0, dtype=torch.uint8)
                )
                state[entry.name] = flat.view(dtype).reshape(shape)
        for tie in manifest.tied:
            base = state[tie.of]
            pairs = base.dtype == TORCH["F4"]  # tied whole, always
            state[tie.name] = (
                base if pairs else torch.as_strided(base, tie.shape, tie.stride, tie.offset)
            )
        return {name: t for name, t in state.items() if not name.startswith("warmcast.storage.")}

    return rebuild


@pytest.fixture
def same_bits() -> Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], None]:
    """Assert that two state dicts hold the same names, dtypes, shapes and bits."""

    def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        assert set(found) == set(expected)
        for name in expected:
            assert bits(found[name]) == bits(expected[name]), name

    return compare


@pytest.fixture
def dtypes_state() -> dict[str, torch.Tensor]:
    return every_dtype()


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """A real Prefect server, one for all tests because it takes seconds to start; its URL."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prefect.settings import (
            PREFECT_API_URL,
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
            temporary_settings,
        )
        from prefect.testing.utilities import prefect_test_harness

        # The thread that beats takes a second to end, of each flow.
        quiet = {PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        with prefect_test_harness(server_startup_timeout=180), temporary_settings(quiet):
            yield str(PREFECT_API_URL.value())
