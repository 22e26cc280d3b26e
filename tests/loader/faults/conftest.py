"""What the tests of faults share: one deployment, and a scene for each test."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from tests.loader.faults.scene import Scene
from tests.loader.faults.worker import REF, build, fingerprint
from warmcast.flows.run import deploy
from warmcast.infra.servers import Valkey, valkey
from warmcast.manifests.deadline import Deadline


@pytest.fixture(scope="session")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An origin's folder, and the fingerprint of the weights that were deployed there."""
    folder = tmp_path_factory.mktemp("deployed")
    source, origin = folder / "source", folder / "origin"
    source.mkdir()
    torch.manual_seed(1)
    model = build()
    (source / "config.json").write_text(json.dumps({"hidden_size": 8}))
    save_model(model, str(source / "model.safetensors"))
    deploy(source, origin.as_uri(), REF, work=folder, deadline=Deadline.after(60))
    return origin, fingerprint(model)


@pytest.fixture
def registry() -> Iterator[Valkey]:
    """A registry of the test's own, to kill and stop."""
    with valkey(Deadline.after(30)) as server:
        yield server


@pytest.fixture
def scene(deployed: tuple[Path, str], registry: Valkey, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(*deployed, registry, tmp_path)
    yield scene
    scene.close()
