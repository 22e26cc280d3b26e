"""A proxy before a real S3 server, and what networks and servers do to requests and answers.

One request suffers one fault; what passes through otherwise is what the server said.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """One request and its answer: the client's socket, and how to get the real server's answer."""

    client: socket.socket
    request: bytes
    forward: Callable[[bytes], bytes]


Fault = Callable[[Exchange], None]
"""Answers, or does not; the connection ends with it."""


class Proxy:
    """Passes requests on, but for those that one of ``faults`` is meant for, first come first."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.faults: deque[tuple[bytes, Fault]] = deque()
        self.requests: list[bytes] = []
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._lock = threading.Lock()
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def fail(self, method: bytes, *faults: Fault) -> None:
        """Let the next requests of a method suffer these, one each."""
        self.faults.extend((method, fault) for fault in faults)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for client in self._open:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(ConnectionError, EOFError):
            while True:
                request = _message(client)
                with self._lock:
                    self.requests.append(request.partition(b"\r\n\r\n")[0])
                    fault = next((f for f in self.faults if request.startswith(f[0])), None)
                    if fault:
                        self.faults.remove(fault)
                if fault:
                    fault[1](Exchange(client, request, self._forward))
                    break
                client.sendall(self._forward(request))
        with self._lock:
            self._open.discard(client)

    def _forward(self, request: bytes) -> bytes:
        with socket.create_connection(self._upstream) as server:
            server.sendall(request)
            return _message(server, head=request.startswith(b"HEAD"))


def _message(connection: socket.socket, head: bool = False) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    end = data.index(b"\r\n\r\n") + 4
    length = re.search(rb"\r\ncontent-length: *(\d+)", data[:end], re.IGNORECASE)
    total = end + (int(length[1]) if length and not head else 0)
    while len(data) < total:
        data += _receive(connection)
    return data


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise EOFError
    return data


# Faults


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def cut(nbytes: int, *, by_reset: bool) -> Fault:
    """End the connection after so many bytes of the body."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.forward(exchange.request)
        exchange.client.sendall(answer[: answer.index(b"\r\n\r\n") + 4 + nbytes])
        if by_reset:
            reset(exchange.client)

    return fault


def lost(exchange: Exchange) -> None:
    """The server does it, and its answer is lost."""
    exchange.forward(exchange.request)
    reset(exchange.client)


def refused(exchange: Exchange) -> None:
    """The request does not reach the server."""
    reset(exchange.client)


def silence(exchange: Exchange) -> None:
    """No answer, and the connection stays open."""
    with suppress(ConnectionError):
        exchange.client.recv(1)


def stall(nbytes: int) -> Fault:
    """So many bytes of the body, then nothing, and the connection stays open."""

    def fault(exchange: Exchange) -> None:
        answer = exchange.forward(exchange.request)
        exchange.client.sendall(answer[: answer.index(b"\r\n\r\n") + 4 + nbytes])
        silence(exchange)

    return fault


def drip(exchange: Exchange) -> None:
    """Fifty bytes of the body, one by one, and then the rest: never silent, and late."""
    data = exchange.forward(exchange.request)
    body = data.index(b"\r\n\r\n") + 4
    pause = threading.Event()
    exchange.client.sendall(data[:body])
    for place in range(body, body + 50):
        pause.wait(0.02)
        exchange.client.sendall(data[place : place + 1])
    exchange.client.sendall(data[body + 50 :])


def answer(status: str, *headers: str, body: str = "") -> Fault:
    def fault(exchange: Exchange) -> None:
        length = f"Content-Length: {len(body)}"
        lines = [f"HTTP/1.1 {status}", *headers, "Connection: close", length, "", body]
        exchange.client.sendall("\r\n".join(lines).encode())

    return fault


def passed(exchange: Exchange) -> None:
    """Nothing is wrong with this one."""
    found = exchange.forward(exchange.request)
    exchange.client.sendall(found.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))


def error(status: str, code: str, *headers: str) -> Fault:
    return answer(status, *headers, body=f"<Error><Code>{code}</Code></Error>")


def without(header: bytes) -> Fault:
    """The request reaches the server without one of its headers."""

    def fault(exchange: Exchange) -> None:
        request = re.sub(rb"\r\n%b: [^\r]*" % header, b"", exchange.request, flags=re.IGNORECASE)
        exchange.client.sendall(exchange.forward(request))

    return fault


def with_answer(pattern: bytes, replacement: bytes) -> Fault:
    """The answer's head is changed on its way."""

    def fault(exchange: Exchange) -> None:
        head, end, body = exchange.forward(exchange.request).partition(b"\r\n\r\n")
        changed = re.sub(pattern, replacement, head, flags=re.IGNORECASE)
        assert changed != head
        exchange.client.sendall(changed + end + body)

    return fault


def flipped_request(exchange: Exchange) -> None:
    """The last byte of the request is damaged on its way."""
    request = exchange.request
    exchange.client.sendall(exchange.forward(request[:-1] + bytes([request[-1] ^ 1])))


def flipped_answer(exchange: Exchange) -> None:
    data = exchange.forward(exchange.request)
    exchange.client.sendall(data[:-1] + bytes([data[-1] ^ 1]))
