"""The process that reads through hf_xet: ``python -P xet_child.py <descriptor>``.

The descriptor is one end of a SOCK_SEQPACKET pair. Each message is a JSON object, a range of a
file, with a pipe beside it that the range is written to, in frames: the frame's length as an int64
in the machine's order, then so many bytes; 0 ends the range, and ``-n`` says that n bytes of a
message follow, of what went wrong. The process ends when the pair's other end is closed.

It is a process, because hf_xet cannot be interrupted, and a process can be ended.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
from functools import lru_cache
from typing import Any

FRAME = struct.Struct("=q")
MESSAGE = 1 << 16  # bytes of a message, at most


def main(descriptor: int) -> None:
    """Serve ranges, several at once, until nobody asks any more."""
    import hf_xet  # type: ignore[import-untyped]

    groups = _Groups(hf_xet)
    with socket.socket(fileno=descriptor) as control:
        while True:
            message, fds, _, _ = socket.recv_fds(control, MESSAGE, 1)
            if not message:
                os._exit(0)  # whatever hf_xet is still doing
            request = json.loads(message)
            threading.Thread(target=_serve, args=(hf_xet, groups, request, fds[0])).start()


class _Groups:
    """A connection to the storage for each token."""

    def __init__(self, hf_xet: Any) -> None:
        session = hf_xet.XetSession()
        self._lock = threading.Lock()
        self._open = lru_cache(4)(
            lambda endpoint, token, expires: session.new_download_stream_group(
                endpoint=endpoint, token=token, token_expiry_unix_secs=expires
            )
        )

    def of(self, endpoint: str, token: str, expires: int) -> Any:
        with self._lock:
            return self._open(endpoint, token, expires)


def _serve(hf_xet: Any, groups: _Groups, request: dict[str, Any], fd: int) -> None:
    with open(fd, "wb", buffering=0) as pipe:
        try:
            group = groups.of(request["endpoint"], request["token"], request["expires"])
            stream = group.download_stream(
                hf_xet.XetFileInfo(request["hash"], request["size"]),
                start=request["start"],
                end=request["end"],
            )
            try:
                for data in stream:
                    _write(pipe.fileno(), FRAME.pack(len(data)), data)
                _write(pipe.fileno(), FRAME.pack(0))
            finally:
                stream.cancel()
        except BrokenPipeError:
            pass  # nobody wants the rest
        except Exception as cause:  # noqa: BLE001
            # Told to the parent, who acts on it.
            text = f"{type(cause).__name__}: {cause}".encode()[:1000]
            _write(pipe.fileno(), FRAME.pack(-len(text)), text)


def _write(fd: int, *pieces: bytes) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
