"""A node that is registered as any other, and answers for its chunks as a test wants it to."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.loader.node.fleet import CHUNK
from tests.manifests.s3_proxy import reset
from warmcast.loader.node.membership import Membership
from warmcast.loader.registry import Registry
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.origin import Origin


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128


class Impostor:
    """A server, and its presence; both end with the context.

    ``asked`` holds the chunks that it was asked for, ``checks`` how often to look again.
    """

    def __init__(self, registry: str, name: str, origin: Origin, answer: Answer) -> None:
        self.name = name
        self.asked: list[tuple[str, int]] = []
        self.checks = 0
        self.over = threading.Event()
        self._origin = origin
        self._answer = answer
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._registry = Registry(registry)
        self.membership = Membership(self._registry, name, self.url)

    def __enter__(self) -> Impostor:
        self._thread.start()
        self.membership.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.membership.close()
        self._registry.close()
        self.over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()  # waits for those who answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        impostor = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 0.5  # between requests of a connection that is kept
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with suppress(ConnectionError):
                    super().handle()

            def do_GET(self) -> None:
                asked = re.fullmatch(r"/chunks/([0-9a-f]{64})/([0-9]+)", self.path)
                assert asked, self.path
                impostor.asked.append((asked[1], int(asked[2])))
                impostor.checks += "Warmcast-Check" in self.headers
                impostor._answer(impostor, self, impostor._chunk(asked[1], int(asked[2])))

            def log_message(self, *words: object) -> None:
                pass

        return Handler

    def _chunk(self, sha256: str, number: int) -> bytes:
        deadline = Deadline.after(10)
        info = self._origin.blob_info(sha256, deadline)
        assert info is not None
        begin = number * CHUNK
        data = bytearray(min(CHUNK, info.size - begin))
        self._origin.read_blob(sha256, begin, memoryview(data), deadline)
        return bytes(data)


Answer = Callable[[Impostor, BaseHTTPRequestHandler, bytes], None]
"""Answers a request for a chunk, whose right bytes it is given."""


def _head(handler: BaseHTTPRequestHandler, status: int, length: int, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(length), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()


def right(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 200, len(data))
    handler.wfile.write(data)


def wrong(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    right(impostor, handler, bytes([data[0] ^ 1]) + data[1:])


def another_length(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    right(impostor, handler, data + b"more")


def no_length(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(data)
    handler.close_connection = True


def cut(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 200, len(data))
    handler.wfile.write(data[: len(data) // 2])
    reset(handler.connection)
    handler.close_connection = True


def garbage(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(b"\x00\xff" * 300 + b"\r\n\r\n")
    handler.close_connection = True


def elsewhere(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Sends whoever asks to itself, where right bytes would be."""
    _head(handler, 302, 0, Location=f"{impostor.url}{handler.path}")


def refusing(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 403, 0)


def failing(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 502, 0)


def silent(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    impostor.over.wait(60)
    handler.close_connection = True


def stalling(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 200, len(data))
    handler.wfile.write(data[:1000])
    silent(impostor, handler, data)


def dripping(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """A byte now and then: never silent, and never done."""
    _head(handler, 200, len(data))
    for place in range(len(data)):
        handler.wfile.write(data[place : place + 1])
        if impostor.over.wait(0.05):
            break
    handler.close_connection = True


def on_its_way(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    impostor.over.wait(0.02)
    _head(handler, 202, 0)


def busy(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    _head(handler, 503, 0)


def asking(impostor: Impostor, handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Says that it asks the ring for it, too."""
    _head(handler, 409, 0)
