"""Where this worker is: its host, and the address that others reach it by."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit


@cache
def host_id() -> str:
    """What two workers of one host have in common, in two containers too: this boot's id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def address_towards(host: str) -> str:
    """The address of the interface by which ``host`` is reached; WARMCAST_HOST overrides it.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    configured = os.environ.get("WARMCAST_HOST")
    if configured:
        return configured
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def address_for(url: str) -> str:
    """The address of the interface by which a URL's host is reached."""
    return address_towards(urlsplit(url).hostname or "localhost")
