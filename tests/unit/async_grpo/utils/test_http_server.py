"""What a client may do to the socket, and what it cannot keep others from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from async_grpo.utils import http_server
from async_grpo.utils.http_server import HttpServer, address_of, listen

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Site:
    """/healthz answers at once, /slow when the test says so."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.slow = 0

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/healthz", self._healthz), Route("/slow", self._slow)])

    async def _healthz(self, _request: Request) -> Response:
        return PlainTextResponse("alive")

    async def _slow(self, _request: Request) -> Response:
        self.slow += 1
        await self.gate.wait()
        return PlainTextResponse("done")


@asynccontextmanager
async def serving(site: Site, most_requests: int = 64) -> AsyncIterator[tuple[str, int]]:
    listener = listen("127.0.0.1", 0)
    place = listener.getsockname()[:2]
    http = HttpServer(site.app(), most_requests)
    running = asyncio.create_task(http.serve(listener))
    try:
        yield place
    finally:
        site.gate.set()
        http.stop()
        await running


async def connected(stack: AsyncExitStack, place: tuple[str, int], said: bytes) -> asyncio.StreamReader:
    """A client that has said so much."""
    reader, writer = await asyncio.open_connection(*place)
    stack.callback(writer.close)
    writer.write(said)
    return reader


async def status_of(place: tuple[str, int], path: str) -> int:
    async with httpx.AsyncClient(base_url=address_of(*place), timeout=10) as client:
        return (await client.get(path)).status_code


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the server closes the connection."""
    rest = b""
    async with asyncio.timeout(5):
        with suppress(ConnectionResetError):
            while more := await reader.read(1000):
                rest += more
    return rest


async def test_300_clients_that_never_end_their_headers_keep_nobody_from_health() -> None:
    async with serving(Site()) as place, AsyncExitStack() as stack:
        for _ in range(300):
            await connected(stack, place, b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        assert await status_of(place, "/healthz") == 200


@pytest.mark.parametrize("before", [b"", b"GET /hea", REQUEST + b"GET /hea"], ids=["silent", "first", "second request"])
async def test_headers_that_do_not_end_in_time_end_the_connection(
    monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.3)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 3600)
    async with serving(Site()) as place:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(before)
        dripping = asyncio.create_task(drip(writer))
        rest = await ends(reader)
        dripping.cancel()
        assert rest.count(b"alive") == before.count(b"\r\n\r\n")


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte of a header, again and again."""
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"x")
            await writer.drain()


async def test_a_request_under_way_has_no_deadline_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.1)
    site = Site()
    async with serving(site) as place:
        asking = asyncio.create_task(status_of(place, "/slow"))
        await asyncio.sleep(0.3)
        assert (site.slow, asking.done()) == (1, False)
        site.gate.set()
        assert await asking == 200


async def test_more_requests_than_there_is_room_for_are_sent_away_but_for_health() -> None:
    site = Site()
    async with serving(site, most_requests=2) as place:
        asking = [asyncio.create_task(status_of(place, "/slow")) for _ in range(2)]
        async with asyncio.timeout(5):
            while site.slow < 2:
                await asyncio.sleep(0.01)
        assert [await status_of(place, path) for path in ("/slow", "/healthz")] == [503, 200]
        site.gate.set()
        assert await asyncio.gather(*asking) == [200, 200]
        assert await status_of(place, "/slow") == 200


async def test_beyond_the_most_connections_the_one_that_waits_longest_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    site = Site()
    async with serving(site) as place, AsyncExitStack() as stack:
        asking = asyncio.create_task(status_of(place, "/slow"))
        async with asyncio.timeout(5):
            while not site.slow:
                await asyncio.sleep(0.01)
        first, second = [await connected(stack, place, b"GET ") for _ in range(2)]
        assert await status_of(place, "/healthz") == 200
        assert await ends(first) == b""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second.read(1), 0.05)
        site.gate.set()
        assert await asking == 200
