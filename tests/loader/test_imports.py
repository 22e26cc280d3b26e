"""What a booting worker imports: nothing of deploy time, no client of a store it does not use."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "prefect", "boto3", "botocore", "google.cloud", "huggingface_hub", "transformers",
    "warmcast.flows",
)  # fmt: skip


def test_importing_the_loader():
    code = f"""
import sys
import warmcast.loader
loader = warmcast.loader.Loader("file:///nowhere", "redis://127.0.0.1:1")
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "[]\n"
