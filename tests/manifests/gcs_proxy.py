"""A proxy before fake-gcs-server that answers as Google Cloud Storage where that server does not.

It holds uploads to the CRC32C that they were begun with, reads to ``ifGenerationMatch``, requests
to the tokens that are good, and keeps resumable uploads itself: where a part begins matters, a
question how far it is changes nothing, and one that is cancelled is gone. The answers are as
Google's and its own storage-testbench give them. Faults are those of :mod:`s3_proxy`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.manifests.s3_proxy import Exchange, Fault, Proxy, answer, passed
from warmcast.manifests.checksum import crc32c, to_base64

_BOUNDARY = b"as-google-would"


@dataclass
class Session:
    """A resumable upload: what it was begun with, and the bytes that came."""

    target: str
    metadata: dict[str, str]
    size: int
    data: bytearray = field(default_factory=bytearray)
    finished: bytes | None = None


class GcsProxy(Proxy):
    """See the module. ``tokens``: those that are good; None where none is asked for."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.tokens: set[str] | None = None
        self.sessions: dict[str, Session] = {}
        self.keep: int | None = None
        """Bytes that are kept of the next part of a resumable upload; None for all."""
        super().__init__(upstream)

    @property
    def unfinished(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.finished is None]

    def _forward(self, request: bytes) -> bytes:
        head, _, body = request.partition(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        if "upload_id" in query:
            return self._of_session(method, query["upload_id"], head, body)
        token = re.search(rb"\r\nauthorization: Bearer ([^\r]*)", head, re.IGNORECASE)
        if self.tokens is not None and (not token or token[1].decode() not in self.tokens):
            return response("401 Unauthorized", failure(401, "authError", "Invalid Credentials"))
        if query.get("uploadType") == "resumable":
            return self._begin(target, head, body)
        if query.get("uploadType") == "multipart":
            metadata, media = _parts(body)
            if error := _wrong_crc32c(metadata, media):
                return error
        found = super()._forward(request)
        wanted = query.get("ifGenerationMatch")
        generation = re.search(rb"\r\nx-goog-generation: (\d+)", found, re.IGNORECASE)
        if method == "GET" and wanted and generation and generation[1].decode() != wanted:
            return _unmet()
        return found

    def _begin(self, target: str, head: bytes, body: bytes) -> bytes:
        size = re.search(rb"\r\nx-upload-content-length: (\d+)", head, re.IGNORECASE)
        assert size
        with self._lock:
            name = f"session-{len(self.sessions)}"
            self.sessions[name] = Session(target, json.loads(body), int(size[1]))
        return response("200 OK", "", f"Location: {self.url}{target}&upload_id={name}")

    def _of_session(self, method: str, name: str, head: bytes, body: bytes) -> bytes:
        session = self.sessions.get(name)
        if session is None:
            return response("404 Not Found", failure(404, "notFound", "Upload session not found"))
        if method == "DELETE":
            del self.sessions[name]
            return response("499 Client Closed Request", "")
        found = re.search(rb"\r\ncontent-range: bytes ([^/]*)/(\d+)", head, re.IGNORECASE)
        assert found
        assert int(found[2]) == session.size
        if session.finished is None and found[1] != b"*":
            self._take(session, int(found[1].partition(b"-")[0]), body)
        if session.finished is None and len(session.data) == session.size:
            done = self._finish(session)
            if not done.startswith(b"HTTP/1.1 200"):
                del self.sessions[name]
                return done
            session.finished = done
        if session.finished is not None:
            return session.finished
        kept = [f"Range: bytes=0-{len(session.data) - 1}"] if session.data else []
        return response("308 Resume Incomplete", "", *kept)

    def _take(self, session: Session, first: int, body: bytes) -> None:
        assert first <= len(session.data), "a part that begins after what came"
        assert len(body) % (256 << 10) == 0 or first + len(body) == session.size
        kept, self.keep = body[: self.keep], None
        session.data += kept[len(session.data) - first :]

    def _finish(self, session: Session) -> bytes:
        """Have the server write it, in one request."""
        if error := _wrong_crc32c(session.metadata, session.data):
            return error
        target = session.target.replace("uploadType=resumable", "uploadType=multipart")
        lines = [
            *(b"--" + _BOUNDARY, b"Content-Type: application/json", b""),
            *(json.dumps(session.metadata).encode(), b"--" + _BOUNDARY),
            *(b"Content-Type: application/octet-stream", b"", session.data),
            *(b"--" + _BOUNDARY + b"--", b""),
        ]
        body = b"\r\n".join(lines)
        head = (
            f"POST {target} HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(body)}\r\n"
            f"Content-Type: multipart/related; boundary={_BOUNDARY.decode()}\r\n\r\n"
        )
        return super()._forward(head.encode() + body)


def response(status: str, body: str, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", body]
    return "\r\n".join(lines).encode()


def failure(code: int, reason: str, message: str) -> str:
    """The body of an answer of the JSON API that is no success."""
    errors = [{"domain": "global", "reason": reason, "message": message}]
    return json.dumps({"error": {"code": code, "message": message, "errors": errors}})


def _unmet() -> bytes:
    message = "At least one of the pre-conditions you specified did not hold."
    return response("412 Precondition Failed", failure(412, "conditionNotMet", message))


def _wrong_crc32c(metadata: dict[str, str], media: bytes | bytearray) -> bytes:
    found, promised = to_base64(crc32c(media)), metadata.get("crc32c")
    assert promised, "an upload without its CRC32C"
    if found == promised:
        return b""
    message = f'Provided CRC32C "{promised}" doesn\'t match calculated CRC32C "{found}".'
    return response("400 Bad Request", failure(400, "invalid", message))


def _parts(body: bytes) -> tuple[dict[str, str], bytes]:
    """The metadata and the media of a multipart upload."""
    boundary = body.partition(b"\r\n")[0]
    _, metadata, media, _ = body.split(boundary)
    return (
        json.loads(metadata.partition(b"\r\n\r\n")[2]),
        media.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n"),
    )


# Faults


def error(status: str, reason: str, message: str = "", *headers: str) -> Fault:
    return answer(status, *headers, body=failure(int(status[:3]), reason, message))


def without_condition(exchange: Exchange) -> None:
    """The server does not heed that a version was named."""
    request = re.sub(rb"&?ifGenerationMatch=\d+", b"", exchange.request, count=1)
    assert request != exchange.request
    exchange.client.sendall(exchange.forward(request))


def flipped_media(exchange: Exchange) -> None:
    """A byte in the middle of the request is damaged on its way."""
    request = bytearray(exchange.request)
    request[len(request) // 2] ^= 1
    passed(Exchange(exchange.client, bytes(request), exchange.forward))
