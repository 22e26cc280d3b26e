"""The agent: the cache, the node's part of the ring, and what answers for them, in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from warmcast.loader.node.cache import Cache
from warmcast.loader.node.catalogue import Catalogue
from warmcast.loader.node.fill import Filler
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.metrics import Metrics
from warmcast.loader.node.peers import Certificates, Peers
from warmcast.loader.node.server import Server
from warmcast.loader.node.tokens import Fleet
from warmcast.loader.registry import Registry
from warmcast.manifests.errors import UsageError
from warmcast.manifests.origin import Origin

log = logging.getLogger("warmcast")

MEMORY = 96 << 20
"""Bytes of chunks under way."""

UPLOADS = 64
"""Chunks that are sent to other nodes at a time."""

_CONNECTIONS = 1024
"""Connections of each kind that are kept open for another request, at most."""

_KEPT_OPEN = 15.0
"""Seconds for which they are."""

_PARTING = 10.0
"""Seconds that uploads have to end when the agent does."""

_LOOK = 5.0
"""Seconds between looks at the certificates."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an agent is told; sizes in bytes, ``background_rate`` in bytes a second (0: no bound).

    ``uploads`` are the chunks that are sent to other nodes at a time. ``listen`` is ``host:port``,
    of which the port may be 0; ``advertise`` is the URL by which other nodes reach it, found out
    from ``listen`` where it is empty.
    """

    cache: Path
    origin: str
    registry: str | None
    socket: Path
    listen: str
    advertise: str
    key: Path
    node: str
    high: int
    low: int
    background_rate: int = 0
    uploads: int = UPLOADS
    memory: int = MEMORY
    certificates: Certificates | None = None


def run(settings: Settings, ready: Callable[[str], None] = lambda _: None) -> None:
    """Be the node's agent until SIGTERM or SIGINT; ``ready`` is told the URL when it answers.

    Raises :class:`UsageError` for settings that do not work.
    """
    with ExitStack() as stack:
        fleet = Fleet.read(settings.key)
        _allow_connections()
        cache = Cache(
            settings.cache, settings.high, settings.low, f"{settings.node}, process {os.getpid()},"
        )
        stack.callback(cache.close)
        origin = stack.enter_context(Origin.open(settings.origin))
        peers = Peers(settings.node, fleet, settings.certificates)
        stack.callback(peers.close)
        registry = None
        if settings.registry:
            registry = Registry(settings.registry)
            stack.callback(registry.close)
        listener, address = _listen(settings)
        stack.callback(listener.close)
        membership = Membership(registry, settings.node, address)
        metrics = Metrics()
        filler = Filler(
            membership,
            peers,
            origin,
            metrics,
            memory=settings.memory,
            rate=settings.background_rate,
        )
        stack.callback(filler.close)
        catalogue = Catalogue(settings.cache / "manifests", origin, membership, peers)
        server = Server(
            cache, catalogue, filler, membership, fleet, metrics, uploads=settings.uploads
        )
        asyncio.run(_serve(settings, server, membership, listener, address, ready))


async def _serve(
    settings: Settings,
    server: Server,
    membership: Membership,
    listener: socket.socket,
    address: str,
    ready: Callable[[str], None],
) -> None:
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with AsyncExitStack() as stack:
        context = None
        if settings.certificates is not None:
            context = _context(settings.certificates)
            watching = asyncio.create_task(_reload(context, settings.certificates))
            stack.callback(watching.cancel)
        nodes = await _running(server.for_nodes(), stack)
        await web.SockSite(nodes, listener, ssl_context=context).start()
        workers = await _running(server.for_workers(), stack)
        try:
            settings.socket.unlink(missing_ok=True)  # a dead agent's: none lives on this cache
            await web.UnixSite(workers, str(settings.socket)).start()
        except OSError as cause:
            raise UsageError(
                f"--socket {settings.socket}",
                expected="a name in a folder that can be written",
                found=cause.strerror or cause,
            ) from None
        stack.callback(settings.socket.unlink, missing_ok=True)
        await asyncio.to_thread(membership.start)
        try:
            log.info("%s answers at %s and %s", settings.node, address, settings.socket)
            ready(address)
            await over.wait()
        finally:
            await asyncio.to_thread(membership.close)
        for _ in range(int(_PARTING / 0.1)):
            if not server.uploads:
                break
            await asyncio.sleep(0.1)


async def _running(app: web.Application, stack: AsyncExitStack) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=_KEPT_OPEN)

    async def bound(_request: web.Request, response: web.StreamResponse) -> None:
        if runner.server is not None and len(runner.server.connections) > _CONNECTIONS:
            response.force_close()

    app.on_response_prepare.append(bound)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    return runner


def _allow_connections() -> None:
    """Raise the number of open files to what the system allows: its default is about a thousand."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(settings: Settings) -> tuple[socket.socket, str]:
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise UsageError("--listen", expected="host:port", found=repr(settings.listen))
    host = host.strip("[]")
    try:
        listener = socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as cause:
        raise UsageError("--listen", expected="an address to listen on", found=cause) from None
    scheme = "http" if settings.certificates is None else "https"
    shown = f"[{host}]" if ":" in host else host
    address = settings.advertise or f"{scheme}://{shown}:{listener.getsockname()[1]}"
    if urlsplit(address).scheme != scheme:
        listener.close()
        raise UsageError("--advertise", expected=f"a URL of {scheme}://", found=repr(address))
    return listener, address.rstrip("/")


def _context(files: Certificates) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Tokens say who may have what. Workers whose agent has gone, and probes, have no certificate.
    context.verify_mode = ssl.CERT_OPTIONAL
    files.load(context)
    return context


async def _reload(context: ssl.SSLContext, files: Certificates) -> None:
    """Take the certificates anew when they change: connections from then on have them."""
    stamp = files.stamp()
    while True:
        await asyncio.sleep(_LOOK)
        try:
            if (now := files.stamp()) != stamp:
                files.load(context)
                stamp = now
                log.info("the certificates are taken anew")
        except (OSError, UsageError) as cause:  # half-written, say: those there are stay
            log.warning("the certificates that there are stay: %s", cause)
