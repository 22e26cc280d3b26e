"""Other nodes' agents, asked by a worker whose own has gone.

Where they speak TLS, ``WARMCAST_TLS_CA`` names the file of the authority that vouches for them.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import StoreError

log = logging.getLogger("warmcast")

_CONNECT = 1.0
_IDLE = 3.0
_COMING = 30.0
"""Seconds that an agent may take to have a chunk."""


class Others:
    """Agents that look for a chunk on their disk, on the ring and in the origin. Safe between
    threads.
    """

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        from warmcast.manifests.stores.http import Http

        self._addresses = random.sample(list(addresses), len(addresses))
        self._lock = threading.Lock()
        self._headers = {"Authorization": f"Bearer {token}", "Warmcast-Ring": "1"}
        authority = os.environ.get("WARMCAST_TLS_CA") or None
        self._http = Http(
            authority, connect=_CONNECT, idle=_IDLE, any_name=authority is not None, direct=True
        )

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Others | None:
        """Those that an agent told of; None if there are none, or no HTTP client is installed."""
        if not told.get("addresses"):
            return None
        try:
            return cls(told["addresses"], told["token"])
        except ImportError:
            return None

    def read_into(
        self, sha256: str, chunk: int, begin: int, view: memoryview, deadline: Deadline
    ) -> bool:
        """Fill ``view`` with a chunk's bytes from ``begin``, unchecked; whether anybody gave it.

        One who does not is not asked again.
        """
        while True:
            with self._lock:
                address = self._addresses[0] if self._addresses else None
            if address is None:
                return False
            url = f"{address}/chunks/{sha256}/{chunk}?begin={begin}&length={len(view)}"
            try:
                self._read(url, view, deadline.within(_COMING))
                return True
            except StoreError as cause:
                deadline.check("reading through other nodes")
                log.info("%s is not asked again: %s", address, cause)
                with self._lock:
                    if address in self._addresses:
                        self._addresses.remove(address)

    def _read(self, url: str, view: memoryview, deadline: Deadline) -> None:
        from warmcast.manifests.stores.http import read_into

        while True:
            with self._http.open("GET", url, deadline, headers=self._headers) as response:
                if response.status == 200:
                    for _ in read_into(response, view, deadline, url, idle=_IDLE):
                        pass
                    return
                if response.status not in (202, 503) or deadline.expired:
                    raise StoreError(url, expected="the chunk", found=response.status)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
