"""Which nodes there are: presence in the registry, renewed, and gone when it is not.

Keys, all under ``warmcast:{nodes}:``:

    alive     sorted set: node -> when its presence expires (server's clock, ms)
    address   hash: node -> where other nodes reach it
    changes   counts the nodes that came and went

One call renews, and brings the list only if it has changed since the last one. While the registry
is away the nodes that were last heard of count as there: who is not is passed by when it is asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from warmcast.loader.errors import RegistryUnavailable
from warmcast.loader.node.ring import Ring
from warmcast.loader.registry import Registry
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import WarmcastError

log = logging.getLogger("warmcast")

BEAT = 1.0
"""Seconds between heartbeats."""

EXPIRY = 5.0
"""Seconds after which a node that is not renewed is gone."""

_KEYS = tuple(f"warmcast:{{nodes}}:{name}" for name in ("alive", "address", "changes"))

_RENEW = """
local now = redis.call('TIME'); local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local changed = 0
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ms)) do
  redis.call('ZREM', KEYS[1], gone); redis.call('HDEL', KEYS[2], gone); changed = 1
end
changed = changed + redis.call('ZADD', KEYS[1], ms + ARGV[3], ARGV[1])
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]); changed = 1
end
local version = tonumber(redis.call('GET', KEYS[3]) or '0')
if changed > 0 then version = redis.call('INCR', KEYS[3]) end
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 3600000) end
if tostring(version) == ARGV[4] then return {version} end
return {version, redis.call('HGETALL', KEYS[2])}
"""
_LEAVE = """
redis.call('ZREM', KEYS[1], ARGV[1])
if redis.call('HDEL', KEYS[2], ARGV[1]) > 0 then redis.call('INCR', KEYS[3]) end
return 1
"""


class Membership:
    """This node's presence, and the others'. :meth:`start` and :meth:`close` by the owner."""

    def __init__(self, registry: Registry | None, node: str, address: str) -> None:
        self.node = node
        self._registry = registry
        self._address = address
        self._version = ""
        self._nodes: Mapping[str, str] = {node: address}
        self._ring = Ring(self._nodes)
        self._over = threading.Event()
        self._heard = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="warmcast-nodes", daemon=True)

    @property
    def ring(self) -> Ring:
        """The placement on the nodes that are there."""
        return self._ring

    @property
    def heard(self) -> bool:
        """Whether the registry answered when it was last asked; True without one."""
        return self._registry is None or self._heard.is_set()

    def address(self, node: str) -> str | None:
        """Where a node is reached."""
        return self._nodes.get(node)

    def start(self) -> None:
        """Be there, and go on being there. A registry that is away is asked again and again."""
        if self._registry is not None:
            self._renew()
            self._thread.start()

    def close(self) -> None:
        """Be gone at once."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._registry is not None:
            try:
                self._registry.run_script(_LEAVE, _KEYS, (self.node,), Deadline.after(1))
            except WarmcastError as cause:
                log.info("%s expires by itself: %s", self.node, cause)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._renew()

    def _renew(self) -> None:
        assert self._registry is not None  # noqa: S101
        arguments = (self.node, self._address, int(EXPIRY * 1000), self._version)
        try:
            found = self._registry.run_script(_RENEW, _KEYS, arguments, Deadline.after(1))
        except RegistryUnavailable as cause:
            if self._heard.is_set():
                log.warning("the nodes last heard of are taken to be there: %s", cause)
            self._heard.clear()
            return
        self._heard.set()
        if len(found) > 1:
            pairs = [bytes(each).decode(errors="replace") for each in found[1]]
            nodes = dict(zip(pairs[::2], pairs[1::2], strict=True))
            self._version = str(int(found[0]))
            if set(nodes) != set(self._nodes):
                log.info("%d nodes", len(nodes))
                self._ring = Ring(nodes)
            self._nodes = nodes
