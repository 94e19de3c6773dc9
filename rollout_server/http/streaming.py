"""Helpers of all routes: bounded reading of bodies, streamed responses, disconnecting clients, and errors.

Errors have the format of OpenAI's API.
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
"""Status in logs and metrics if the client disconnected; the client itself sees none."""


class HttpError(Exception):
    """Error of one request; the server continues. The message has the fault, its reason and the fix."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The body {"error": {...}} of OpenAI's API."""
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        elif self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response with this status and body."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def not_ready_error(reason: str) -> HttpError:
    """Error 503 for a server that is not ready."""
    return HttpError(503, f"not ready: {reason}. Retry later", code="not_ready", headers={"retry-after": "1"})


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """Read the body of a request. Raises HttpError 415, 413 or 408."""
    # Only JSON: a web page can send other types to another origin without asking that server first (CORS preflight).
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
        raise HttpError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Return the result of `work`, and cancel it if the client disconnects or the time is up.

    Raises HttpError 499 after a disconnect (no client reads it), 504 after `timeout_s` seconds.
    """

    async def wait_for_disconnect() -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            raise HttpError(504, f"not answered within rollout.http.request_timeout_s ({timeout_s:g} s)") from None
        raise HttpError(CLIENT_LEFT, "the client disconnected")

    return await race(work, wait_for_disconnect())


class EventStream(Response):
    """Response of server-sent events, each a JSON object; the last is [DONE]."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        headers: Mapping[str, str],
        *,
        close: Callable[[], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        """`close` is called at the end, also after an error."""
        super().__init__(headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they arrive."""
        try:
            await run_while_connected(receive, self._send_events(send), self._timeout_s)
        except HttpError as error:
            # The status has been sent, so the error is the last event. A client that does not read must not block us.
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENT_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": _encode_event(error.body()), "more_body": False})
        finally:
            await self._close()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": _encode_event(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _encode_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
