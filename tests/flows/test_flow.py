"""The flow against a real Prefect server, started once because that takes seconds."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from warmcast.flows.errors import NoWeights
from warmcast.manifests.errors import StoreError

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")

# Prefect's own server and client, not we, use what their dependencies have deprecated, and leave
# an event queue to the garbage collector when the test server stops.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:prefect"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=180):
            yield


@pytest.fixture
def deploy_flow(prefect_server):
    from warmcast.flows.deploy import deploy_flow

    return deploy_flow


async def _artifacts():
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        return await client.read_artifacts()


async def _task_runs():
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        return await client.read_task_runs()


def test_flow(deploy_flow, source, file_url, work):
    torch.save({"layers.0.w": torch.ones(4, 4), "norm": torch.ones(3)}, source / "weights.pt")
    options = {"work": str(work), "meshes": [{"dimensions": {"tp": 2}, "plan": {"*.w": "tp:0"}}]}
    first = deploy_flow(str(source), file_url, "m@a", **options)
    assert (first["changed"], first["moved_files"]) == (True, 3)
    artifact = max(asyncio.run(_artifacts()), key=lambda a: a.created)
    assert artifact.key == "warmcast-deploy"
    assert artifact.description == first["summary"]
    rows = json.loads(artifact.data)
    assert {row["file"]: row["moved"] for row in rows} == dict.fromkeys(
        ["config.json", "model.safetensors", "tokenizer.json"], "yes"
    )
    names = {run.name for run in asyncio.run(_task_runs())}
    assert {"mirror config.json", "mirror model.safetensors", "mirror tokenizer.json"} <= names
    second = deploy_flow(str(source), file_url, "m@a", **options)
    assert (second["changed"], second["moved_files"]) == (False, 0)


def test_flow_that_fails_says_why(deploy_flow, source, file_url, caplog):
    with pytest.raises(NoWeights, match="top folder"):
        deploy_flow(str(source), file_url, "m@a")
    assert "Traceback" not in caplog.text


def test_one_failed_file_ends_the_others(deploy_flow, source, file_url):
    save_file({"w": torch.ones(3)}, source / "model.safetensors")
    (source.parent / "store").write_bytes(b"")
    with pytest.raises(StoreError, match="folders above it"):
        deploy_flow(str(source), file_url, "m@a")
