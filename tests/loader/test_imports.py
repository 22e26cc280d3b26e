"""What a booting worker imports: nothing of deploy time, no client of a store it does not use; and
what a node's agent does: no torch.
"""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "prefect", "boto3", "botocore", "google.cloud", "huggingface_hub", "transformers", "aiohttp",
    "warmcast.flows",
)  # fmt: skip


def imported(code: str, names: tuple[str, ...]) -> list[str]:
    """Those of ``names`` that are imported once ``code`` has run."""
    code += f"\nimport sys; print(' '.join(name for name in {names!r} if name in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return found.stdout.split()


def test_importing_the_loader():
    code = """
from warmcast.loader import Loader
loader = Loader("file:///nowhere", "redis://127.0.0.1:1")
"""
    assert imported(code, HEAVY) == []


def test_building_a_skeleton_does_not_import_the_compiler():
    code = """
import torch
from warmcast.loader import Loader, skeleton
with skeleton():
    torch.nn.Linear(2, 2)
"""
    assert imported(code, ("torch._dynamo", "sympy")) == []


def test_the_node_agent_has_no_torch():
    assert imported("import warmcast.loader.node.agent", ("torch", "safetensors")) == []


def test_every_name_is_there():
    code = """
import warmcast.loader
for name in warmcast.loader.__all__:
    getattr(warmcast.loader, name)
assert callable(warmcast.loader.skeleton)
"""
    assert imported(code, ()) == []
