"""What a server allows: ``python -m warmcast.infra.bench.stream.http_reads JSON``.

The JSON names a deployment (the origin it is in, its ref, its files by name), an empty origin at an
S3 server, and seconds. The deployment is brought there, and its blobs are read back as fast as
``http.client`` reads into a buffer, unchecked. Told are bytes a second, by the way of reading.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from warmcast.infra.demo.channel import Channel, serve
from warmcast.manifests.checksum import from_hex
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError
from warmcast.manifests.manifest import Manifest
from warmcast.manifests.origin import Origin, Ref, blob_key
from warmcast.manifests.stores.s3 import S3Store

_CONNECTIONS = (1, 4, 8)
_RANGE = 32 << 20
_SIGNED_FOR = 3600  # seconds a signed URL is good for: longer than the reads take


@dataclass(frozen=True, slots=True)
class _Blob:
    """A blob's signed URL, and its size in bytes."""

    url: str
    size: int


def main(channel: Channel) -> None:
    """Upload, read, tell."""
    told = json.loads(sys.argv[1])
    deadline = Deadline.after(told["seconds"])
    with Origin.open(told["source"]) as source:
        manifest = source.resolve(told["ref"], deadline)
    store = S3Store(told["origin"])
    with Origin(store) as origin:
        _upload(origin, manifest, Ref.parse(told["ref"]), told["files"], deadline)
        blobs = [_Blob(_signed(store, file.sha256), file.size) for file in manifest.files]
    channel.tell(
        {
            f"{count} connection{'s' if count > 1 else ''}, {_RANGE >> 20} MiB": _read(
                blobs, count, deadline
            )
            for count in _CONNECTIONS
        }
    )
    channel.wait_for("end")


def _upload(
    origin: Origin, manifest: Manifest, ref: Ref, files: Mapping[str, str], deadline: Deadline
) -> None:
    for entry in manifest.files:
        with Path(files[entry.path]).open("rb") as file:
            origin.put_blob(entry.sha256, file, entry.size, from_hex(entry.crc32c), deadline)
    origin.put_manifest(manifest, deadline)
    origin.move_ref(ref, manifest.digest, None, deadline)


def _signed(store: S3Store, sha256: str) -> str:
    """A URL under which a blob can be read for a while."""
    return store.client.generate_presigned_url(
        "get_object",
        Params={"Bucket": urlsplit(store.url).netloc, "Key": store.name(blob_key(sha256))},
        ExpiresIn=_SIGNED_FOR,
    )


def _read(blobs: Sequence[_Blob], connections: int, deadline: Deadline) -> float:
    """Bytes a second of reading every blob once, each connection in a thread of its own."""
    ranges = iter(
        [
            (blob, begin, min(_RANGE, blob.size - begin))
            for blob in blobs
            for begin in range(0, blob.size, _RANGE)
        ]
    )
    buffers = [_buffer() for _ in range(connections)]
    lock = threading.Lock()
    with ThreadPoolExecutor(connections) as pool:
        began = time.perf_counter()
        lanes = [pool.submit(_lane, ranges, lock, buffer, deadline) for buffer in buffers]
        total = sum(lane.result() for lane in lanes)
        seconds = time.perf_counter() - began
    for buffer in buffers:
        buffer.close()
    return total / seconds


def _lane(
    ranges: Iterator[tuple[_Blob, int, int]],
    lock: threading.Lock,
    buffer: mmap.mmap,
    deadline: Deadline,
) -> int:
    """Read the next range until there is none; the bytes that were read."""
    total = 0
    connection: HTTPConnection | None = None
    try:
        while True:
            with lock:
                job = next(ranges, None)
            if job is None:
                return total
            blob, begin, length = job
            deadline.check("reading over HTTP")
            if connection is None:
                connection = HTTPConnection(
                    urlsplit(blob.url).netloc, timeout=max(0.1, deadline.remaining())
                )
            _get(connection, blob, begin, length, buffer)
            total += length
    finally:
        if connection is not None:
            connection.close()


def _get(
    connection: HTTPConnection, blob: _Blob, begin: int, length: int, buffer: mmap.mmap
) -> None:
    """Read one range into the beginning of ``buffer``; raises :class:`StoreError`, OSError."""
    parts = urlsplit(blob.url)
    asked = {"Range": f"bytes={begin}-{begin + length - 1}"}
    connection.request("GET", f"{parts.path}?{parts.query}", headers=asked)
    response = connection.getresponse()
    if response.status != 206:
        raise StoreError(parts.path, expected="status 206", found=response.status)
    with memoryview(buffer) as view:
        done = 0
        while done < length:
            count = response.readinto(view[done:length])
            if not count:
                raise StoreError(parts.path, expected=f"{length} bytes", found=done)
            done += count
    response.read()  # which ends the response, and lets the connection be used again


def _buffer() -> mmap.mmap:
    """Memory that is there: no page of it is made while the clock runs."""
    buffer = mmap.mmap(-1, _RANGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.write(bytes(_RANGE))
    return buffer


if __name__ == "__main__":
    serve(main)
