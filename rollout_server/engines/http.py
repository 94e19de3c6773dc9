"""Completions from the rollout servers of a live run, over HTTP, with their current weights.

    generate, stream --POST /v1/completions--> the server with the fewest requests of ours --> Generation

A request waits for a free slot (freed when another request ends) and then for the response. Both waits end at the
request's timeout. A busy server (status 429 or 503) is retried after a pause. A server that cannot be reached is not
used again; the others take over. Training continues and no version is pinned, so every token comes with the policy
version that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import numpy as np

from async_grpo.errors import EngineError, WaitTimeout
from async_grpo.wire import VersionSpan
from rollout_server.engines.base import Generation, GenerationRequest

KEY_VARIABLE = "ASYNC_GRPO_HTTP_KEY"
"""Environment variable with the key for completions, for servers and clients."""
MAX_REPLY_BYTES = 64 << 20
BUSY_STATUSES = (429, 503)
RETRY_PAUSE_S = 0.5
CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 5.0
"""Seconds to keep idle connections. Shorter than the server's limit, so the server never closes one that we are about
to use."""
_MAX_SHOWN_CHARACTERS = 300
"""Length to which a server's message is cut in errors."""


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    policy_versions: list[VersionSpan]
    logprobs: dict[str, Any]
    finish_reason: str | None = None


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class HttpSampler:
    """The `Sampler` interface over one or more servers of a run."""

    def __init__(self, addresses: Sequence[str], *, max_concurrency: int, timeout_s: float, key: str = "") -> None:
        """Create a sampler; connections are opened on first use.

        max_concurrency: maximum requests in flight per server (its rollout.http.max_concurrency). timeout_s: timeout of
        one request, including waits for busy servers. key: the servers' ASYNC_GRPO_HTTP_KEY.
        """
        self._in_flight = dict.fromkeys(addresses, 0)
        """Requests in flight by address, for the servers that have not failed."""
        self._slots = asyncio.Semaphore(max_concurrency * len(addresses))
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._last_failure = ""
        """Address and error of the server that failed last."""

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that have not failed."""
        return list(self._in_flight)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Raises EngineError, WaitTimeout."""
        async with self._request_completion(request, stream=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise EngineError(f"{response.url}: the response is larger than {MAX_REPLY_BYTES} bytes")
        return _parse_reply(bytes(body))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and yield it in pieces. Raises EngineError, WaitTimeout."""
        async with self._request_completion(request, stream=True) as response:
            async for line in response.content:
                event = line.strip().removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    yield _parse_reply(event)

    def peek(self, request_id: str) -> Generation | None:
        """Return None: only the server has the tokens of a request in flight."""
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _request_completion(
        self, request: GenerationRequest, *, stream: bool
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200 from any server. Raises EngineError, WaitTimeout."""
        try:
            async with (
                self._slots,
                asyncio.timeout(self._timeout_s),
                self._post_with_retries(_request_body(request, stream=stream)) as response,
            ):
                yield response
        except TimeoutError:
            raise WaitTimeout(
                f"completion {request.request_id} of {', '.join(self._in_flight) or 'the run'}",
                self._timeout_s,
                "The servers may be busy with training: try again later, or request fewer completions",
            ) from None
        except (aiohttp.ClientError, ValueError) as error:  # while the body was read
            raise EngineError(
                f"the connection to a rollout server broke ({type(error).__name__}: {error}). Has it left the run?"
            ) from error

    @asynccontextmanager
    async def _post_with_retries(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        while True:
            address = self._least_busy_server()
            self._in_flight[address] += 1
            try:
                response = await self._post(address, body)
                if response is not None:
                    async with response:
                        yield response
                    return
            finally:
                if address in self._in_flight:  # `_post` removes a server that cannot be reached
                    self._in_flight[address] -= 1
            await asyncio.sleep(RETRY_PAUSE_S)

    def _least_busy_server(self) -> str:
        if not self._in_flight:
            raise EngineError(
                f"no rollout server of the run responds any more ({self._last_failure}). Is the run still going?"
            )
        return min(self._in_flight, key=lambda address: self._in_flight[address])

    async def _post(self, address: str, body: dict[str, Any]) -> aiohttp.ClientResponse | None:
        """Return the response, or None if the server is busy or unreachable. Raises EngineError if it refuses."""
        session = self._open_session()
        try:
            response = await session.post(
                f"{address}/v1/completions", json=body, headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            self._in_flight.pop(address, None)
            self._last_failure = f"{address}: {type(error).__name__}"
            return None

        if response.status == 200:
            return response
        async with response:
            if response.status in BUSY_STATUSES:
                return None
            # A character has at most 4 bytes in UTF-8.
            message = (await response.content.read(_MAX_SHOWN_CHARACTERS * 4)).decode("utf-8", "replace")
            raise EngineError(f"{address} refused with status {response.status}: {message[:_MAX_SHOWN_CHARACTERS]}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
            cookies = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=cookies)
        return self._session


def _request_body(request: GenerationRequest, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [*request.prompt, *request.prefix],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    return body


def _parse_reply(body: bytes) -> Generation:
    """Return the completion of a response. Raises EngineError if it is malformed or reports an error."""
    try:
        reply = msgspec.json.decode(body, type=_Reply)
        if reply.error is None:
            (choice,) = reply.choices
            logprobs = np.asarray(choice.logprobs["token_logprobs"], np.float32)
            tokens = np.asarray(choice.token_ids, np.int32)
            return Generation(tokens, logprobs, choice.policy_versions, choice.finish_reason or "")
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise EngineError(
            f"cannot read a rollout server's response ({type(error).__name__}: {error}). Does the server run this "
            "release?"
        ) from error
    message = str(reply.error.get("message", reply.error))
    raise EngineError(f"a rollout server reports: {message[:_MAX_SHOWN_CHARACTERS]}")
