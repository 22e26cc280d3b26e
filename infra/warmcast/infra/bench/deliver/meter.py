"""A TCP proxy before the origin, which counts the bytes that it answers."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import TracebackType

_PIECE = 1 << 18


class Meter:
    """Forwards connections to a port of 127.0.0.1, in a thread; ends with its context."""

    def __init__(self, port: int) -> None:
        self.answered = 0  # bytes, of headers too
        self.port = 0
        self._target = port
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="bench-meter", daemon=True)
        self._over: asyncio.Event | None = None

    def wait_for(self, answered: int, seconds: float) -> bool:
        """Wait until so many bytes were answered; whether they were, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.answered >= answered, seconds)

    def __enter__(self) -> Meter:
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self.port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        with self._changed:
            self.port = server.sockets[0].getsockname()[1]
            self._changed.notify_all()
        await self._over.wait()
        server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._target, limit=_PIECE
            )
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.ensure_future(self._pump(reader, up_writer, counted=False)),
            asyncio.ensure_future(self._pump(up_reader, writer, counted=True)),
        ]
        try:
            with suppress(asyncio.CancelledError):  # the meter ends
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in (writer, up_writer):
                each.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE):
                if counted:
                    with self._changed:
                        self.answered += len(data)
                        self._changed.notify_all()
                writer.write(data)
                await writer.drain()
