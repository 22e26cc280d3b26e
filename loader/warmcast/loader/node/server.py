"""What an agent answers: other nodes over HTTP, the node's workers over a Unix socket.

For nodes, with a token that names a manifest (see :mod:`tokens`):

    GET /chunks/<sha256>/<number>   200 the chunk, or ``?begin=&length=`` of it; 202 it is on its
                                    way, ask again; 409 it is being asked of the ring; 503 busy,
                                    ``Warmcast-Try`` names a node that has it. Of the request's
                                    headers ``Warmcast-Check`` has it checked before, with
                                    ``Warmcast-If-There`` it is 404 rather than fetched, with
                                    ``Warmcast-Ring`` it is looked for on the ring too: a worker
                                    asks, whose agent has gone
    GET /manifests/<digest>         200 the manifest; 404
    GET /refs/<model>@<name>        200 what the origin last said of a ref here; 404. The token is
                                    one for no manifest

For whoever looks after the agent: ``/healthz``, ``/readyz``, ``/metrics``.

For workers, who are let in by the socket's permissions:

    GET /refs/<model>@<name>        the digest, as text
    GET /manifests/<digest>         the manifest
    GET /signatures/<digest>        its signatures by their keys' names, in hex: a JSON object
    GET /files/<manifest>?wanted=   lines, as the chunks of a manifest's files come (``wanted``:
                                    their numbers, all without it): first a JSON object with the
                                    names of each one's blob, then ``<file> <chunk> <tier>`` each,
                                    then ``end``, or ``failed <why>``; ``.`` while nothing comes.
                                    The files stay until the worker closes the connection
    GET /others/<manifest>          whom to ask for chunks should this agent go: a JSON object with
                                    ``addresses``, and a ``token`` for them. ``?ref=`` is what the
                                    worker knows the manifest by
    GET /check/<manifest>           202; every chunk of it that is there is checked
    GET /prefetch/<manifest>        lines: ``<bytes there> <bytes in all>``, then ``end`` or
                                    ``failed <why>``

Names in requests are digests and numbers, matched as such; none becomes a path but by the cache.
Chunks go from the file to the socket by ``sendfile``; TLS has them read and encrypted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

from aiohttp import web

from warmcast.loader.node.cache import Blob, Cache, CacheFull, Spec
from warmcast.loader.node.catalogue import Catalogue
from warmcast.loader.node.contents import Contents
from warmcast.loader.node.fill import Filler, Wish
from warmcast.loader.node.membership import Membership
from warmcast.loader.node.metrics import Metrics
from warmcast.loader.node.passed_on import PassedOn
from warmcast.loader.node.tokens import LONGEST, NO_MANIFEST, Fleet, NotAllowed
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import NotFound, WarmcastError, one_line

log = logging.getLogger("warmcast")

_ON_ITS_WAY = 1.5
"""Seconds that a node waits for a chunk here, before it is told to ask again."""

_CALL = 30.0
_AHEAD = 64
"""Chunks that are wanted at a time for one worker."""

_STILL = 2.0
"""Seconds of silence after which who waits is told that it is waited for."""

_HELD = 3600.0
"""Seconds for which files that have all come stay for a worker that reads them."""

_LOOK = 0.05

_ROOM = 0.3
"""Seconds until room is looked for again."""

_OTHERS = 8
"""Agents that a worker is told of."""

_PIECE = 1 << 18
"""Bytes of a chunk that are read to be encrypted."""

_TRIES = 3
_SHA = "[0-9a-f]{64}"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """The answers. Run in one event loop; what blocks is done in its threads."""

    def __init__(
        self,
        cache: Cache,
        catalogue: Catalogue,
        filler: Filler,
        membership: Membership,
        fleet: Fleet,
        metrics: Metrics,
        *,
        uploads: int,
    ) -> None:
        """``uploads``: chunks that are sent to nodes at a time, at most."""
        self._most = uploads
        self._cache = cache
        self._catalogue = catalogue
        self._filler = filler
        self._membership = membership
        self._fleet = fleet
        self._metrics = metrics
        self._uploads = 0
        self._passed_on = PassedOn()
        self._working: set[asyncio.Task[None]] = set()
        metrics.watch("warmcast_cache_bytes", "Bytes in the cache", lambda: cache.nbytes)
        metrics.watch("warmcast_cache_evicted_bytes", "Bytes deleted", lambda: cache.evicted)
        metrics.watch("warmcast_blobs_in_use", "Blobs read or written", lambda: cache.in_use)
        metrics.watch("warmcast_chunks_in_flight", "Chunks wanted", lambda: filler.under_way)
        metrics.watch("warmcast_uploads", "Chunks being sent to nodes", lambda: self._uploads)
        metrics.watch("warmcast_nodes", "Nodes there", lambda: len(membership.ring.nodes))

    @property
    def uploads(self) -> int:
        """Chunks that are being sent to other nodes."""
        return self._uploads

    def for_nodes(self) -> web.Application:
        """What other nodes, and Prometheus, may ask."""
        app = web.Application(middlewares=[_explained])
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._tell_metrics)
        app.router.add_get(rf"/chunks/{{sha256:{_SHA}}}/{{number:[0-9]{{1,7}}}}", self._chunk)
        app.router.add_get(rf"/manifests/{{digest:{_SHA}}}", self._known_manifest)
        app.router.add_get(r"/refs/{ref:.{1,512}}", self._known_ref)
        return app

    def for_workers(self) -> web.Application:
        """What the node's workers may ask."""
        app = web.Application(middlewares=[_explained])
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/metrics", self._tell_metrics)
        app.router.add_get(r"/refs/{ref:.{1,512}}", self._ref)
        app.router.add_get(rf"/manifests/{{digest:{_SHA}}}", self._manifest)
        app.router.add_get(rf"/signatures/{{digest:{_SHA}}}", self._signatures)
        app.router.add_get(rf"/files/{{digest:{_SHA}}}", self._files)
        app.router.add_get(rf"/others/{{digest:{_SHA}}}", self._others)
        app.router.add_get(rf"/check/{{digest:{_SHA}}}", self._check)
        app.router.add_get(rf"/prefetch/{{digest:{_SHA}}}", self._prefetch)
        return app

    # For whoever looks after it

    async def _alive(self, _request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        if not self._membership.heard:
            return web.Response(status=503, text="the registry does not answer\n")
        return web.Response(text="ready\n")

    async def _tell_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain")

    # For nodes

    def _allowed(self, request: web.Request) -> str:
        """The manifest that a request's token names."""
        given = request.headers.get("Authorization", "")
        try:
            return self._fleet.check(given.removeprefix("Bearer "))
        except NotAllowed:
            self._metrics.refused.inc()
            raise

    async def _known_manifest(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        if self._allowed(request) != digest:
            self._metrics.refused.inc()
            raise NotAllowed("token", expected=f"one for manifest {digest}")
        file = await asyncio.to_thread(self._catalogue.known_file, digest)
        return web.Response(status=404) if file is None else web.FileResponse(file)

    async def _known_ref(self, request: web.Request) -> web.Response:
        if self._allowed(request) != NO_MANIFEST:
            self._metrics.refused.inc()
            raise NotAllowed("token", expected="one for no manifest")
        known = await asyncio.to_thread(self._catalogue.known_ref, request.match_info["ref"])
        if known is None:
            return web.Response(status=404)
        return web.json_response({"manifest": known.manifest, "at": known.at})

    async def _chunk(self, request: web.Request) -> web.StreamResponse:
        digest = self._allowed(request)
        sha256, number = request.match_info["sha256"], int(request.match_info["number"])
        spec = await self._spec(digest, sha256)
        if number >= len(spec.crcs):
            raise NotFound(f"chunk {number}", expected=f"{len(spec.crcs)} chunks")
        if self._uploads >= self._most:
            self._metrics.busy.inc()
            return web.Response(status=503, headers=self._passed_on.instead(sha256, number))
        self._uploads += 1
        try:
            with self._cache.use(spec) as blob:
                there = await self._there(blob, number, check="Warmcast-Check" in request.headers)
                if not there and "Warmcast-If-There" in request.headers:
                    return web.Response(status=404)
                wish = Wish.WORKER if "Warmcast-Ring" in request.headers else Wish.NODE
                if not there and not await self._came(digest, blob, number, wish):
                    return self._not_yet(sha256, number, wish)
                response = await self._send(request, blob, number)
                self._passed_on.note(sha256, number, request.headers.get("Warmcast-Node", ""))
                return response
        finally:
            self._uploads -= 1

    # What is known is told without a thread: the way there and back costs more than the answer.

    async def _spec(self, digest: str, sha256: str) -> Spec:
        try:
            spec = self._catalogue.known_spec(digest, sha256)
            if spec is None:
                spec = await asyncio.to_thread(
                    self._catalogue.spec, digest, sha256, Deadline.after(_CALL)
                )
            return spec
        except NotFound as cause:
            self._metrics.refused.inc()
            raise NotAllowed(f"blob {sha256}", expected="one that the manifest lists") from cause

    async def _there(self, blob: Blob, number: int, *, check: bool) -> bool:
        if check:
            return await asyncio.to_thread(blob.check, number)
        return blob.known(number) or await asyncio.to_thread(blob.has, number)

    async def _came(self, digest: str, blob: Blob, number: int, wish: Wish) -> bool:
        """Have a chunk fetched; whether it has come."""
        with self._filler.wanted(digest, blob, number, wish) as future:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_shared(future), _ON_ITS_WAY)
                return True
            return False

    def _not_yet(self, sha256: str, number: int, wish: Wish) -> web.Response:
        # Who asks the ring for it may be asking the one who asks here.
        busy = wish is Wish.NODE and self._filler.asks_the_ring(sha256, number)
        return web.Response(status=409 if busy else 202, headers={"Retry-After": "0"})

    async def _send(self, request: web.Request, blob: Blob, number: int) -> web.StreamResponse:
        begin, length = _part(request, *blob.spec.span(number))
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = length
        await response.prepare(request)
        with os.fdopen(blob.open(), "rb", buffering=0) as file:
            transport = request.transport
            if transport is None:
                raise ConnectionResetError("the other node has gone")
            if transport.get_extra_info("sslcontext") is None:
                await asyncio.get_running_loop().sendfile(transport, file, begin, length)
            else:
                await _encrypt(response, file.fileno(), begin, length)
        self._metrics.sent.inc(length)
        await response.write_eof()
        return response

    # For workers

    async def _ref(self, request: web.Request) -> web.Response:
        name = request.match_info["ref"]
        digest = await asyncio.to_thread(self._catalogue.resolve, name, Deadline.after(_CALL))
        return web.Response(text=digest)

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        digest = request.match_info["digest"]
        found = await asyncio.to_thread(self._catalogue.file, digest, Deadline.after(_CALL))
        return web.FileResponse(found)

    async def _contents(self, request: web.Request) -> tuple[str, Contents]:
        digest = request.match_info["digest"]
        return digest, await asyncio.to_thread(
            self._catalogue.contents, digest, Deadline.after(_CALL)
        )

    async def _signatures(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(
            self._catalogue.signatures, request.match_info["digest"], Deadline.after(_CALL)
        )
        return web.json_response({name: signature.hex() for name, signature in found.items()})

    async def _files(self, request: web.Request) -> web.StreamResponse:
        digest, contents = await self._contents(request)
        wanted = _numbers(request.query.get("wanted"), len(contents.files))
        with ExitStack() as stack:
            blobs = {
                number: stack.enter_context(self._cache.use(contents.files[number]))
                for number in wanted
            }
            lines = await _lines(request)
            names = {number: _names(self._cache, blob) for number, blob in blobs.items()}
            await _say(lines, json.dumps(names))

            async def came(file: int, chunk: int, tier: str) -> None:
                if tier != "origin":
                    self._metrics.saved.inc(blobs[file].spec.span(chunk)[1])
                await _say(lines, f"{file} {chunk} {tier}")

            with self._filler.foreground():
                await self._until_end(lines, self._bring(digest, blobs, Wish.WORKER, came, lines))
            await _parted(request)  # until then it may still read
        return lines

    async def _others(self, request: web.Request) -> web.Response:
        if "ref" in request.query:
            # What a ref names has to be known here, too, by the time that the origin is away.
            self._beside(
                asyncio.to_thread(
                    self._catalogue.resolve, request.query["ref"], Deadline.after(_CALL)
                )
            )
        nodes = [n for n in self._membership.ring.nodes if n != self._membership.node]
        chosen = random.sample(nodes, min(_OTHERS, len(nodes)))
        addresses = [self._membership.address(node) for node in chosen]
        return web.json_response(
            {
                "addresses": [address for address in addresses if address is not None],
                "token": self._fleet.token(request.match_info["digest"], LONGEST),
            }
        )

    async def _prefetch(self, request: web.Request) -> web.StreamResponse:
        digest, contents = await self._contents(request)
        lines = await _lines(request)
        specs = list(contents.blobs.values())
        total, done = sum(spec.size for spec in specs), 0

        async def came(file: int, chunk: int, _tier: str) -> None:
            nonlocal done
            done += specs[file].span(chunk)[1]
            await _say(lines, f"{done} {total}")

        async def bring() -> None:
            # One after another: what has come may be evicted meanwhile.
            for number, spec in enumerate(specs):
                with self._cache.use(spec) as blob:
                    await self._bring(digest, {number: blob}, Wish.BACKGROUND, came, lines)

        await self._until_end(lines, bring())
        return lines

    async def _check(self, request: web.Request) -> web.Response:
        _, contents = await self._contents(request)

        def check() -> None:
            for spec in contents.blobs.values():
                with self._cache.use(spec) as blob:
                    for number in set(range(len(spec.crcs))) - set(blob.missing()):
                        blob.check(number)

        self._beside(asyncio.to_thread(check))
        return web.Response(status=202)

    def _beside(self, work: Coroutine[Any, Any, object]) -> None:
        """Have something done that nobody waits for."""

        async def done() -> None:
            try:
                await work
            except WarmcastError as cause:
                log.info("%s", one_line(cause))

        task = asyncio.create_task(done())
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _until_end(self, lines: web.StreamResponse, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except WarmcastError as cause:
            await _say(lines, f"failed {one_line(cause)}")
        else:
            await _say(lines, "end")

    async def _bring(
        self,
        digest: str,
        blobs: Mapping[int, Blob],
        wish: Wish,
        came: Callable[[int, int, str], Awaitable[None]],
        lines: web.StreamResponse,
    ) -> None:
        """Have all chunks of some blobs, some at a time; ``came`` is told of each, ``lines`` when
        there is nothing to tell.
        """
        orders = await asyncio.to_thread(
            lambda: [(number, self._filler.order(blob)) for number, blob in blobs.items()]
        )
        # As they are needed: of a large model they are many, and each worker has its own.
        order = ((number, chunk) for number, chunks in orders for chunk in chunks.tolist())
        running: set[asyncio.Task[tuple[int, int, str]]] = set()

        async def one(number: int, chunk: int) -> tuple[int, int, str]:
            return number, chunk, await self._one(digest, blobs[number], chunk, wish)

        try:
            while True:
                for number, chunk in islice(order, _AHEAD - len(running)):
                    running.add(asyncio.create_task(one(number, chunk)))
                if not running:
                    return
                done, running = await asyncio.wait(
                    running, timeout=_STILL, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await _say(lines, ".")
                for task in done:
                    await came(*task.result())
        finally:
            for task in running:
                task.cancel()

    async def _one(self, digest: str, blob: Blob, number: int, wish: Wish) -> str:
        for last in (*[False] * (_TRIES - 1), True):
            with self._filler.wanted(digest, blob, number, wish) as future:
                try:
                    return await _shared(future)
                except CacheFull:
                    if last:
                        raise
                    await asyncio.sleep(_ROOM)  # somebody may be done with what is in the way
                except WarmcastError as cause:
                    if last:
                        raise
                    log.info("chunk %d of %s again: %s", number, blob.spec.sha256[:12], cause)
        raise AssertionError


def _shared(future: Future[str]) -> asyncio.Future[str]:
    """To await what others await too: who gives up ends it for nobody else."""
    mine = asyncio.wrap_future(future)
    mine.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(mine)


async def _parted(request: web.Request) -> None:
    """Return when whoever asked has closed the connection."""
    for _ in range(int(_HELD / _LOOK)):
        if request.transport is None or request.transport.is_closing():
            return
        await asyncio.sleep(_LOOK)


def _part(request: web.Request, begin: int, length: int) -> tuple[int, int]:
    """Where the bytes of a chunk begin that are asked for, and how many they are."""
    query = request.query
    if "begin" not in query and "length" not in query:
        return begin, length
    given = [query.get(name, "") for name in ("begin", "length")]
    if all(text.isdecimal() and text.isascii() and len(text) < 12 for text in given):
        first, count = map(int, given)
        if count and first + count <= length:
            return begin + first, count
    raise NotFound("part", expected=f"bytes of a chunk of {length}", found=" ".join(given)[:64])


def _names(cache: Cache, blob: Blob) -> list[str]:
    """Where a blob's bytes are when it is whole, and until then."""
    sha256 = blob.spec.sha256
    return [str(path.absolute()) for path in (cache.whole(sha256), cache.partial(sha256))]


def _numbers(text: str | None, count: int) -> list[int]:
    """File numbers, ``0,3,7``; all there are for None."""
    if text is None:
        return list(range(count))
    parts = text.split(",")
    if not all(part.isdecimal() and part.isascii() and int(part) < count for part in parts):
        raise NotFound("wanted", expected=f"numbers of {count} files", found=repr(text[:64]))
    return sorted({int(part) for part in parts})


async def _lines(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    return response


async def _encrypt(response: web.StreamResponse, fd: int, begin: int, length: int) -> None:
    """Send a part of a file through TLS, in pieces longer than the event loop's own of 16 KiB."""
    for at in range(begin, begin + length, _PIECE):
        nbytes = min(_PIECE, begin + length - at)
        await response.write(await asyncio.to_thread(os.pread, fd, nbytes, at))


async def _say(lines: web.StreamResponse, line: str) -> None:
    await lines.write(f"{line}\n".encode())


@web.middleware
async def _explained(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into a status and one line."""
    try:
        return await handler(request)
    except NotAllowed as cause:
        return web.Response(status=403, text=f"{one_line(cause)}\n")
    except NotFound as cause:
        return web.Response(status=404, text=f"{one_line(cause)}\n")
    except CacheFull as cause:
        return web.Response(status=507, text=f"{one_line(cause)}\n")
    except ConnectionError:  # whoever asked has gone
        return web.Response(status=400)
    except WarmcastError as cause:
        return web.Response(status=502, text=f"{one_line(cause)}\n")
