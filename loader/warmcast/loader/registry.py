"""Who has what: presence, mailboxes and leases, in Redis.

Keys, all under ``warmcast:{<identity>}:`` or ``warmcast:{<mailbox>}:`` (the braces keep one
identity's keys in one slot of a cluster), every one with an expiry:

    senders            sorted set: sender -> when its presence expires (server's clock, ms)
    sender:<id>        its presence, JSON
    waiters            set: mailboxes to tell when a sender appears or a lease ends
    lease              the holder's token
    fence              the fencing token: counts the leases ever given
    <mailbox>          list: messages, taken by blocking pops

A presence is renewed by heartbeat, whole, so that a registry that lost its memory knows it again
at the next beat. Every call ends by its deadline: a registry that is gone, stopped or slow is
:class:`RegistryUnavailable`, and a load goes on without it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import redis
from pydantic import Field, StringConstraints
from redis.backoff import NoBackoff
from redis.retry import Retry

from warmcast.loader.errors import RegistryUnavailable
from warmcast.manifests.canonical import parse_json
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import InvalidData, UsageError
from warmcast.manifests.manifest import Record, Sha256, parse_record

log = logging.getLogger("warmcast")

CALL = 1.0
"""Seconds that the registry has to answer one call, at most."""

BEAT = 1.0
"""Seconds between heartbeats."""

EXPIRY = 5.0
"""Seconds after which a presence or lease that is not renewed is gone."""

_MAIL = 60.0

# Far longer than anybody believes to hold a lease: until then the fencing token only grows.
_FENCE = 86_400.0

Text = Annotated[str, StringConstraints(max_length=512)]


class Presence(Record):
    """A worker that has a state's weights and serves them.

    ``sender`` is new at each start of serving (its generation); ``active`` counts the receivers
    that it serves now.
    """

    sender: Text
    identity: Sha256
    host: Text
    device: Text
    transports: tuple[Text, ...]
    active: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to load an identity from the origin while others wait.

    ``fence`` grows with every lease given for the identity: of two writers that both believe to
    hold it, the one with the larger fence is right.
    """

    identity: str
    token: str
    fence: int


_ANNOUNCE = """
local now = redis.call('TIME'); local ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ms)
local new = redis.call('ZADD', KEYS[1], ms + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return new
"""
_SENDERS = """
local now = redis.call('TIME'); local ms = now[1] * 1000 + math.floor(now[2] / 1000)
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], ms, '+inf')) do
  local text = redis.call('GET', ARGV[1] .. id)
  if text then found[#found + 1] = text end
end
return found
"""
_WAKE = """
for _, box in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  redis.call('RPUSH', box, ARGV[1]); redis.call('PEXPIRE', box, ARGV[2])
end
return redis.call('DEL', KEYS[1])
"""
_ACQUIRE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  local fence = redis.call('INCR', KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return fence
end
return 0
"""
_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


_call = threading.local()
"""The ``deadline`` of the call that a thread is in."""

_MARGIN = 0.2
"""Seconds by which an answer may be late: that to a blocking pop comes at its deadline."""


def _timed(base: Any) -> Any:
    """A class of connections that give up when the deadline of their thread's call is over."""

    def left() -> float:
        return min(CALL, float(_call.deadline.remaining()) + _MARGIN)

    class Timed(base):  # type: ignore[misc]
        def _connect(self) -> Any:
            self.socket_connect_timeout = left()
            connected = super()._connect()
            connected.settimeout(left())
            return connected

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if self._sock is not None:
                self._sock.settimeout(left())
            super().send_packed_command(command, check_health)

    return Timed


class Watch:
    """What a waiter holds: news since the watch began is not missed."""

    def __init__(self, registry: Registry, box: str) -> None:
        self._registry = registry
        self._box = box

    def wait(self, deadline: Deadline) -> str | None:
        """The first news, or None after the deadline."""
        message = self._registry.pop(self._box, deadline)
        return message.decode(errors="replace") if message is not None else None


class Registry:
    """A connection pool to one Redis. Safe for use from several threads."""

    def __init__(self, url: str) -> None:
        try:
            self._pool = redis.ConnectionPool.from_url(
                url,
                # No retries beneath us: they would multiply the time a call may take.
                retry=Retry(NoBackoff(), 0),
                health_check_interval=0,
            )
        except ValueError as cause:
            raise UsageError("registry", expected="redis://host:port", found=str(cause)) from None
        self._pool.connection_class = _timed(self._pool.connection_class)
        self._client = redis.Redis(connection_pool=self._pool)
        self.url = url

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._pool.disconnect()

    # Presence

    def announce(self, presence: Presence, deadline: Deadline) -> None:
        """Say, or say again, that a sender is there; whoever waits for one is told."""
        keys = (_key(presence.identity, "senders"), _sender_key(presence))
        text = presence.model_dump_json()
        if self.run_script(_ANNOUNCE, keys, (presence.sender, text, _ms(EXPIRY)), deadline):
            self.wake(presence.identity, "sender", deadline)

    def withdraw(self, presence: Presence, deadline: Deadline) -> None:
        """Take a sender's presence back at once, and wake it if it waits for requests."""
        box = mailbox(presence.sender)

        def call(client: redis.Redis) -> None:
            with client.pipeline() as pipe:
                pipe.zrem(_key(presence.identity, "senders"), presence.sender)
                pipe.delete(_sender_key(presence), box)
                pipe.rpush(box, b"")
                pipe.pexpire(box, _ms(BEAT))
                pipe.execute()

        self._call(call, deadline)

    def senders(self, identity: str, deadline: Deadline) -> list[Presence]:
        """The senders of an identity, as they last announced themselves.

        A record that is no presence is passed over: it must not hide the senders beside it.
        """
        prefix = _key(identity, "sender:")
        found = self.run_script(_SENDERS, (_key(identity, "senders"),), (prefix,), deadline)
        senders = []
        for text in found:
            try:
                senders.append(_presence(text))
            except InvalidData as cause:
                log.warning("registry %s: %s", self.url, cause)
        return senders

    def present(self, presence: Presence, deadline: Deadline) -> bool:
        """Whether a sender's presence is still there."""
        return bool(self._call(lambda client: client.exists(_sender_key(presence)), deadline))

    # Waiting for somebody else

    @contextmanager
    def watch(self, identity: str, deadline: Deadline) -> Iterator[Watch]:
        """From now on be told when a sender of an identity appears, has room, or a lease ends."""
        box = _key(identity, f"wait:{secrets.token_hex(8)}")
        waiters = _key(identity, "waiters")

        def enter(client: redis.Redis) -> None:
            with client.pipeline() as pipe:
                pipe.sadd(waiters, box)
                pipe.pexpire(waiters, _ms(_MAIL))
                pipe.execute()

        self._call(enter, deadline)
        try:
            yield Watch(self, box)
        finally:
            with contextlib.suppress(RegistryUnavailable):
                self._call(lambda client: client.srem(waiters, box), Deadline.after(CALL))

    def wake(self, identity: str, news: str, deadline: Deadline) -> None:
        """Tell whoever waits for an identity that something changed."""
        self.run_script(_WAKE, (_key(identity, "waiters"),), (news, _ms(_MAIL)), deadline)

    # Mailboxes

    def push(self, box: str, message: bytes, deadline: Deadline) -> None:
        """Put a message into a mailbox; it is gone after a minute."""

        def call(client: redis.Redis) -> None:
            with client.pipeline() as pipe:
                pipe.rpush(box, message)
                pipe.pexpire(box, _ms(_MAIL))
                pipe.execute()

        self._call(call, deadline)

    def pop(self, box: str, deadline: Deadline) -> bytes | None:
        """Take the next message out of a mailbox; None if none came before the deadline.

        The pop blocks in slices shorter than a call may take, so that a registry that died is
        noticed, and returns as soon as there is a message.
        """
        while not deadline.expired:
            slice_ = max(0.01, min(CALL / 2, deadline.remaining()))
            reply = self._call(lambda client, s=slice_: client.blpop([box], timeout=s), deadline)
            if reply is not None:
                return bytes(reply[1])
        return None

    def take(self, box: str, deadline: Deadline) -> bytes | None:
        """Take the next message out of a mailbox if there is one; nobody waits for it."""
        reply = self._call(lambda client: client.lpop(box), deadline)
        return bytes(reply) if reply is not None else None

    def peek(self, box: str, deadline: Deadline) -> bytes | None:
        """The message in a mailbox that holds one, left where it is; None after the deadline."""
        while not deadline.expired:
            slice_ = max(0.01, min(CALL / 2, deadline.remaining()))
            # Moving a list's only element onto itself waits for it without taking it.
            reply = self._call(
                lambda client, s=slice_: client.blmove(box, box, s, "LEFT", "RIGHT"), deadline
            )
            if reply is not None:
                return bytes(reply)
        return None

    def discard(self, box: str, deadline: Deadline) -> None:
        """Take a mailbox away with what is in it."""
        self._call(lambda client: client.delete(box), deadline)

    # Signs of life

    def beat(self, key: str, deadline: Deadline) -> None:
        """Set a sign of life that expires unless it is set again."""
        self._call(lambda client: client.set(key, b"1", px=_ms(EXPIRY)), deadline)

    def alive(self, key: str, deadline: Deadline) -> bool:
        """Whether a sign of life is there."""
        return bool(self._call(lambda client: client.exists(key), deadline))

    # Leases

    def acquire(self, identity: str, deadline: Deadline) -> Lease | None:
        """Take the lease of an identity; None if somebody else holds it."""
        token = secrets.token_hex(16)
        keys = (_key(identity, "lease"), _key(identity, "fence"))
        fence = self.run_script(_ACQUIRE, keys, (token, _ms(EXPIRY), _ms(_FENCE)), deadline)
        return Lease(identity, token, int(fence)) if fence else None

    def renew(self, lease: Lease, deadline: Deadline) -> bool:
        """Keep a lease; False if it was lost."""
        keys = (_key(lease.identity, "lease"),)
        return bool(self.run_script(_RENEW, keys, (lease.token, _ms(EXPIRY)), deadline))

    def release(self, lease: Lease, deadline: Deadline) -> None:
        """Give a lease back, and tell whoever waits; nothing happens if it was lost before."""
        keys = (_key(lease.identity, "lease"),)
        if self.run_script(_RELEASE, keys, (lease.token,), deadline):
            self.wake(lease.identity, "lease", deadline)

    def run_script(
        self, text: str, keys: tuple[str, ...], args: tuple[Any, ...], deadline: Deadline
    ) -> Any:
        """Run a Lua script; its answer. Raises :class:`RegistryUnavailable`."""
        return self._call(lambda client: client.eval(text, len(keys), *keys, *args), deadline)

    def _call(self, call: Any, deadline: Deadline) -> Any:
        deadline.check("asking the registry")
        _call.deadline = deadline
        try:
            return call(self._client)
        except (redis.RedisError, OSError) as cause:
            raise RegistryUnavailable(
                f"registry {self.url}", expected="an answer", found=str(cause) or repr(cause)
            ) from cause


def mailbox(owner: str) -> str:
    """The mailbox of a sender or of one request."""
    return f"warmcast:{{{owner}}}:mail"


def _key(identity: str, name: str) -> str:
    return f"warmcast:{{{identity}}}:{name}"


def _sender_key(presence: Presence) -> str:
    return _key(presence.identity, f"sender:{presence.sender}")


def _presence(text: bytes) -> Presence:
    return parse_record(Presence, parse_json(text, "presence", InvalidData), "presence")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
