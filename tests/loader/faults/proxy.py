"""A TCP proxy before the registry that answers late, or cuts connections within an answer."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Proxy:
    """Forwards to a port of 127.0.0.1; ends with its context.

    Each answer is held back for ``delay`` seconds; each connection is reset after ``cut_after``
    bytes of answers, if that is not None.
    """

    def __init__(self, port: int, *, delay: float = 0.0, cut_after: int | None = None) -> None:
        self._target = port
        self._delay = delay
        self._cut_after = cut_after
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection, and take no more: who is behind it is alone."""
        self._run(self._end())

    def _run(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _end(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pumps = [
            asyncio.ensure_future(self._questions(reader, up_writer)),
            asyncio.ensure_future(self._answers(up_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in (writer, up_writer):
                each.transport.abort()

    async def _questions(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self._cut_after
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self._delay)
                writer.write(data if left is None else data[:left])
                await writer.drain()
                if left is not None and (left := left - len(data)) <= 0:
                    return
