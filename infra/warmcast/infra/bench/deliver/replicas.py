"""All replicas of a burst: ``python -m warmcast.infra.bench.deliver.replicas JSON``.

First it deploys the model that the JSON names to the origin; then, for each number that it is told,
it brings the model to replicas on the nodes from that number on, all at once, each in a thread, by
the code with which a worker reads from its node: chunks as the agent says that they are there, past
it where it has gone. Each chunk is checked.
None goes on before each has met its agent: one that comes when its agent is gone reads the origin.
A replica holds nothing: fifty models would not fit into one machine's memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warmcast.infra.demo.channel import Channel, serve
from warmcast.loader.node.client import NodeClient
from warmcast.loader.node.others import Others
from warmcast.loader.routes.node import Arrivals, others_of
from warmcast.manifests.checksum import crc32c, to_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import IntegrityError, WarmcastError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref


def main(channel: Channel) -> None:
    """Deploy, and answer each word with what became of the replicas."""
    told = json.loads(sys.argv[1])
    deadline = Deadline.after(told["seconds"])
    with Origin.open(told["origin"]) as origin:
        manifest = _deploy(
            Origin.open(told["source"]), origin, told["ref"], told["files"], deadline
        )
        channel.tell({"digest": manifest.digest})
        while (word := channel.next_word()) != "end":
            sockets = told["sockets"][int(word) :]
            channel.tell(_burst(origin, manifest, sockets, told["replicas"], deadline))


def _deploy(
    source: Origin, origin: Origin, ref: str, files: Mapping[str, str], deadline: Deadline
) -> Manifest:
    manifest = source.resolve(ref, deadline)
    for file in manifest.files:
        with Path(files[file.path]).open("rb") as data:
            origin.put_blob(file.sha256, data, file.size, int(file.crc32c, 16), deadline)
    origin.put_manifest(manifest, deadline)
    origin.move_ref(Ref.parse(ref), manifest.digest, None, deadline)
    return manifest


def _burst(
    origin: Origin, manifest: Manifest, sockets: list[str], replicas: int, deadline: Deadline
) -> dict[str, Any]:
    seconds: list[float] = []
    errors: list[str] = []
    tiers: Counter[str] = Counter()
    begun = threading.Barrier(replicas)
    began = time.monotonic()

    def replica(number: int) -> None:
        node = NodeClient(Path(sockets[number % len(sockets)]))
        try:
            others = others_of(node, manifest, deadline)
            begun.wait(deadline.remaining())
            tiers.update(_read(node, others, origin, manifest, deadline))
            seconds.append(time.monotonic() - began)
        except (WarmcastError, threading.BrokenBarrierError) as cause:
            begun.abort()
            errors.append(str(cause))

    threads = [threading.Thread(target=replica, args=(number,)) for number in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seconds": sorted(seconds), "errors": errors, "tiers": dict(tiers)}


def _read(
    node: NodeClient,
    others: Others | None,
    origin: Origin,
    manifest: Manifest,
    deadline: Deadline,
) -> Mapping[str, int]:
    """Read every chunk as a worker of the node does, and check it; where the chunks came from."""
    paths = {file.path for file in manifest.files}
    buffer = memoryview(bytearray(manifest.chunk_size))
    with Arrivals(node, others, origin, manifest, paths, deadline) as blobs:
        for file in manifest.files:
            reader = blobs.open_blob(file.sha256, deadline)
            try:
                for number, expected in enumerate(file.chunks):
                    begin = number * manifest.chunk_size
                    piece = buffer[: min(manifest.chunk_size, file.size - begin)]
                    reader.read_into(begin, piece, deadline)
                    if (found := to_hex(crc32c(piece))) != expected:
                        raise IntegrityError(
                            f"{file.path} at byte {begin}", expected=expected, found=found
                        )
            finally:
                reader.close()
        return blobs.tiers


if __name__ == "__main__":
    serve(main)
