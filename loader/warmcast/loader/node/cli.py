"""The commands ``warmcast node`` and ``warmcast prefetch``, as functions for typer."""

from __future__ import annotations

import logging
import re
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError, WarmcastError

SOCKET = Path("/run/warmcast/node.sock")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20,
          "GI": 1 << 30, "TI": 1 << 40}  # fmt: skip
_HIGH, _LOW = "90%", "80%"


def node(
    origin: Annotated[str, typer.Option(envvar="WARMCAST_ORIGIN", help="The origin's URL.")],
    cache: Annotated[
        Path, typer.Option(envvar="WARMCAST_CACHE", help="A folder on the local disk.")
    ],
    key_file: Annotated[
        Path, typer.Option(envvar="WARMCAST_FLEET_KEY_FILE", help="The fleet's key.")
    ],
    registry: Annotated[
        str | None,
        typer.Option(envvar="WARMCAST_REGISTRY", help="redis://host:port; none: no other nodes."),
    ] = None,
    socket_path: Annotated[
        Path, typer.Option("--socket", envvar="WARMCAST_NODE", help="For the node's workers.")
    ] = SOCKET,
    listen: Annotated[
        str, typer.Option(envvar="WARMCAST_LISTEN", help="host:port for other nodes.")
    ] = "127.0.0.1:7077",
    advertise: Annotated[
        str, typer.Option(envvar="WARMCAST_ADVERTISE", help="The URL by which nodes reach it.")
    ] = "",
    name: Annotated[
        str, typer.Option(envvar="WARMCAST_NODE_NAME", help="The node's name; its host's.")
    ] = "",
    high: Annotated[
        str,
        typer.Option(
            envvar="WARMCAST_CACHE_HIGH", help="Bytes, or a part of the disk, to hold at most."
        ),
    ] = _HIGH,
    low: Annotated[
        str, typer.Option(envvar="WARMCAST_CACHE_LOW", help="What to come down to then.")
    ] = _LOW,
    background_rate: Annotated[
        str,
        typer.Option(
            envvar="WARMCAST_BACKGROUND_RATE", help="Bytes a second of prefetching; 0: no bound."
        ),
    ] = "0",
    uploads: Annotated[
        int, typer.Option(envvar="WARMCAST_UPLOADS", help="Chunks sent to nodes at a time.")
    ] = 64,
    tls_cert: Annotated[Path | None, typer.Option(envvar="WARMCAST_TLS_CERT")] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="WARMCAST_TLS_KEY")] = None,
    tls_ca: Annotated[Path | None, typer.Option(envvar="WARMCAST_TLS_CA")] = None,
) -> None:
    """Be the node's agent: cache blobs on its disk, share them with the other nodes."""
    try:
        from warmcast.loader.node.agent import Settings, run
        from warmcast.loader.node.peers import Certificates
    except ModuleNotFoundError as cause:
        raise UsageError(
            "warmcast node",
            expected=f"the package {cause.name!r}",
            found="it is not installed",
            do="pip install 'warmcast[node]'",
        ) from cause

    name = name or socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name):
        raise UsageError("--name", expected="letters, digits, '.', '_' and '-'", found=repr(name))
    if uploads < 1:
        raise UsageError("--uploads", expected="1 at least", found=uploads)
    files = (tls_cert, tls_key, tls_ca)
    if any(files) and not all(files):
        raise UsageError("TLS", expected="--tls-cert, --tls-key and --tls-ca together")
    certificates = None
    if tls_cert and tls_key and tls_ca:
        certificates = Certificates(tls_cert, tls_key, tls_ca)
    settings = Settings(
        cache=cache,
        origin=origin,
        registry=registry,
        socket=socket_path,
        listen=listen,
        advertise=advertise,
        key=key_file,
        node=name,
        high=_bytes("--high", high, cache),
        low=_bytes("--low", low, cache),
        background_rate=_bytes("--background-rate", background_rate, cache),
        uploads=uploads,
        certificates=certificates,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run(settings, lambda address: print(f"ready {address}", flush=True))


def prefetch(
    ref: Annotated[
        str, typer.Argument(help="What to warm the node with: model@name, or a digest.")
    ],
    socket_path: Annotated[
        Path, typer.Option("--socket", envvar="WARMCAST_NODE", help="The agent's socket.")
    ] = SOCKET,
    deadline: Annotated[
        float, typer.Option(envvar="WARMCAST_DEADLINE", help="Seconds until all must be there.")
    ] = 3600.0,
) -> None:
    """Have the node's agent fetch what a ref names; ends when all is there."""
    if not deadline > 0:
        raise UsageError("--deadline", expected="more than 0 seconds", found=deadline)
    from warmcast.loader.node.client import NodeClient, Progress

    limit = Deadline.after(deadline)
    client = NodeClient(socket_path)
    client.wait_for(limit)
    progress = Progress(sys.stderr)
    digest = client.resolve(ref, limit)
    for done, total in client.prefetch(digest, limit):
        progress.show(done, total)
    progress.end()
    print(f"{ref} ({digest[:12]}) is there")


def _bytes(option: str, text: str, folder: Path) -> int:
    """A size: ``256MiB``, ``1.5GB``, a number of bytes, or a part of the folder's disk, ``80%``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] == "I":
        raise UsageError(option, expected="a size like 500GB, 256MiB or 80%", found=repr(text))
    if match[2] != "%":
        return int(float(match[1]) * _UNITS[match[2]])
    import shutil

    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        return int(shutil.disk_usage(there).total * float(match[1]) / 100)
    except OSError as cause:
        raise WarmcastError(f"{option} of {folder}", found=cause) from cause
