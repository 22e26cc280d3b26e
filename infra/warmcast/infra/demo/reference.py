"""A process of the demo: the model as transformers reads it from its folder.

    python -m warmcast.infra.demo.reference FOLDER DEVICE

It tells what :func:`warmcast.infra.demo.encode.encode` returns, and ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from warmcast.infra.demo import encode
from warmcast.infra.demo.channel import Channel, serve


def main(channel: Channel) -> None:
    """Load, encode, tell."""
    folder, device = Path(sys.argv[1]), torch.device(sys.argv[2])
    encode.prepare()
    channel.tell(encode.encode(encode.read(folder, device), folder, device))


if __name__ == "__main__":
    serve(main)
