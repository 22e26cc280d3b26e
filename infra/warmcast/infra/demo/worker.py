"""A process of the demo: a worker, which knows nothing but its environment, a ref and a device.

    python -m warmcast.infra.demo.worker REF DEVICE

Its configuration, tokenizer and weights come from the origin or from peers. It tells when its
skeleton is built; told ``load``, it loads, becomes a sender, and tells its report and
what :func:`warmcast.infra.demo.encode.encode` returns; told ``end``, it takes leave of its peers.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import torch

from warmcast.infra.demo import encode
from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader import Loader
from warmcast.loader.dtypes import torch_dtype
from warmcast.loader.environment import Settings
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError
from warmcast.manifests.manifest import FileEntry, Manifest
from warmcast.manifests.origin import Origin


def main(channel: Channel) -> None:
    """Boot, serve, end."""
    ref, device = sys.argv[1], torch.device(sys.argv[2])
    encode.prepare()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as name, Loader.from_env() as loader:
        folder = Path(name)
        manifest = _bring_the_rest(ref, folder)
        with loader.skeleton():
            model = encode.build(folder, _dtype(manifest))
        channel.tell({"ready": True})
        channel.wait_for("load")
        report = loader.load(model, ref, device)
        loader.serve(model)
        encoded = encode.encode(model, folder, device)
        channel.tell({"report": report.to_json(), "tree": str(report), **encoded})
        channel.wait_for("end")


def _bring_the_rest(ref: str, folder: Path) -> Manifest:
    """Write the deployment's files, but for the weights, to ``folder``."""
    settings = Settings.from_env()
    deadline = Deadline.after(settings.deadline)
    with Origin.open(settings.origin) as origin:
        manifest = origin.resolve(ref, deadline)
        weights = {tensor.file for tensor in manifest.tensors}
        for file in manifest.files:
            if file.path not in weights:
                _bring(origin, file, folder, deadline)
    return manifest


def _bring(origin: Origin, file: FileEntry, folder: Path, deadline: Deadline) -> None:
    data = bytearray(file.size)
    origin.read_blob(file.sha256, 0, memoryview(data), deadline)
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        raise IntegrityError(file.path, expected=f"SHA-256 {file.sha256}", found=found)
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _dtype(manifest: Manifest) -> torch.dtype:
    """The dtype of the checkpoint's first floating-point tensor."""
    found = (torch_dtype(tensor.dtype) for tensor in manifest.tensors)
    return next((dtype for dtype in found if dtype and dtype.is_floating_point), torch.float32)


if __name__ == "__main__":
    serve(main)
