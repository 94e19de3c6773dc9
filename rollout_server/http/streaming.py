"""What every route uses: bounded reading of requests, streamed answers, clients that leave, and errors.

Errors have the form that OpenAI's clients read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from async_grpo.utils.aio import race

T = TypeVar("T")

BODY_TIMEOUT_S = 30.0
LAST_EVENT_TIMEOUT_S = 1.0
CLIENT_LEFT = 499
"""Status in logs and metrics for a client that left; the client itself sees none."""
REFUSED, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"


class HttpError(Exception):
    """An error of one request; the server goes on. The message says what is wrong, why, and how to mend it."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The body {"error": {...}} of OpenAI's API."""
        kind = BUSY if self.status == 429 else BROKEN if self.status >= 500 else REFUSED
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer with this status and body."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def not_ready(reason: str) -> HttpError:
    """The error 503 of a server that is not ready, for this reason."""
    return HttpError(503, f"not ready: {reason}. Ask again later", code="not_ready", headers={"retry-after": "1"})


async def read_json(request: Request, limit_bytes: int) -> bytes:
    """The body of a request. Raises HttpError 415, 413 or 408.

    Only `application/json` is taken: a web page cannot send that to another origin unasked.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "the body must be JSON: send the header 'Content-Type: application/json'")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise HttpError(413, f"the body is longer than rollout.http.max_body_bytes ({limit_bytes})")
    except TimeoutError:
        raise HttpError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """The result of the work. The work is cancelled if the client leaves (raises HttpError 499, which no client reads)
    or after `timeout_s` seconds (raises HttpError 504)."""

    async def give_up() -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await _left(receive)
        except TimeoutError:
            raise HttpError(504, f"not answered within rollout.http.request_timeout_s ({timeout_s:g} s)") from None
        raise HttpError(CLIENT_LEFT, "the client left")

    return await race(work, give_up())


class EventStream(Response):
    """A response of server-sent events, each a JSON object; the last is [DONE]."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        headers: Mapping[str, str],
        *,
        close: Callable[[], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """`close` is called at the end in any case."""
        super().__init__(headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come. The status is already sent, so an error becomes the last event."""
        try:
            await unless_gone(receive, self._send_all(send), self._timeout_s)
        except HttpError as error:
            with suppress(TimeoutError):  # a client that does not read does not read this either
                async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": _event(error.body()), "more_body": False})
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
