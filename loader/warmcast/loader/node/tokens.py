"""Tokens: who may have a chunk. Checked by every node alone, with no question to anybody.

A token names a manifest, and lets its bearer have the chunks that this manifest lists until it
expires. It is signed (HMAC-SHA256) with the fleet's key, which every agent has and no worker::

    w1.<manifest's digest, 64 hex digits>.<expiry, seconds since 1970>.<signature, base64url>

Nodes' clocks may differ by ``LEEWAY``. A node whose clock is further off is refused, takes its
chunks from the origin, and says why.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from pathlib import Path

from warmcast.manifests.errors import UsageError, WarmcastError

LIFETIME = 300.0
"""Seconds that a node's token is good for."""

LONGEST = 3600.0
"""Seconds that any token may be good for: as long as a worker's load."""

NO_MANIFEST = "0" * 64
"""What a token names that is good for no chunk, and tells that a node of the fleet asks."""

LEEWAY = 60.0
"""Seconds that two nodes' clocks may differ by."""

_SHORTEST = 32
_TOKEN = re.compile(r"(w1\.([0-9a-f]{64})\.([0-9]{1,12}))\.([A-Za-z0-9_-]{43})", re.ASCII)


class NotAllowed(WarmcastError):
    """A token that is missing, malformed, expired, signed by somebody else, or for other bytes."""


class Fleet:
    """The fleet's key: makes tokens and checks them."""

    def __init__(self, key: bytes) -> None:
        if len(key) < _SHORTEST:
            raise UsageError(
                "the fleet's key",
                expected=f"{_SHORTEST} bytes at least",
                found=len(key),
                do="make one with: head -c 48 /dev/urandom | base64",
            )
        self._key = key

    @classmethod
    def read(cls, path: Path) -> Fleet:
        """The key in a file, which may end with a newline."""
        try:
            return cls(path.read_bytes().strip())
        except OSError as cause:
            raise UsageError(
                f"the fleet's key {path}", expected="a file", found=cause.strerror or cause
            ) from None

    def token(self, manifest: str, lifetime: float = LIFETIME) -> str:
        """A token for a manifest's chunks, good for ``lifetime`` seconds from now on."""
        said = f"w1.{manifest}.{int(time.time() + min(lifetime, LONGEST))}"
        return f"{said}.{self._signature(said)}"

    def check(self, token: str) -> str:
        """The digest of the manifest that a token names. Raises :class:`NotAllowed`."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise NotAllowed("token", expected="w1.<manifest>.<expiry>.<signature>")
        said, manifest, expiry, signature = match.groups()
        if not hmac.compare_digest(signature, self._signature(said)):
            raise NotAllowed("token", expected="the signature of this fleet", found="another")
        now = time.time()
        if not now - LEEWAY <= int(expiry) <= now + LONGEST + LEEWAY:
            raise NotAllowed(
                "token",
                expected=f"an expiry within {LONGEST:.0f} s",
                found=f"{int(expiry) - now:+.0f} s from now",
                do="compare the nodes' clocks",
            )
        return manifest

    def _signature(self, said: str) -> str:
        made = hmac.new(self._key, said.encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(made).decode().rstrip("=")
