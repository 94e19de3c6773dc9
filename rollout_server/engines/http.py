"""Completions over HTTP from the rollout servers of a live run, with the weights that they have at the time.

    generate, stream --POST /v1/completions--> the server with the fewest requests of ours --> Generation

A request waits for a free place (another request that ends frees it), then for the answer; the server unblocks it, or
the deadline. A server that says "too many" or "not now" is asked again after a pause. A server that cannot be reached
is not asked again, and the others take its place. Training goes on and no version is pinned, so every token comes with
the policy version that wrote it.
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
"""Environment variable with the key for completions, of servers and of their clients."""
MAX_REPLY_BYTES = 64 << 20
BUSY = (429, 503)
PAUSE_S = 0.5
CONNECT_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 5.0
"""Seconds that idle connections are kept: less than the server keeps them, so that it never closes one in use."""
_SHOWN = 300


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int]
    policy_versions: list[VersionSpan]
    logprobs: dict[str, Any]
    finish_reason: str | None = None


class _Reply(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


class HttpSampler:
    """The `Sampler` protocol over one or more servers of a run."""

    def __init__(self, addresses: Sequence[str], *, at_once: int, patience_s: float, key: str = "") -> None:
        """`at_once`: most requests under way at one server (its rollout.http.max_concurrency). `patience_s`: timeout of
        one request, waits for busy servers included. `key`: the servers' ASYNC_GRPO_HTTP_KEY."""
        self._under_way = dict.fromkeys(addresses, 0)
        self._room = asyncio.Semaphore(at_once * len(addresses))
        self._patience_s = patience_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._lost = ""

    @property
    def addresses(self) -> list[str]:
        """Addresses of the servers that have not failed."""
        return list(self._under_way)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one completion. Raises EngineError, WaitTimeout."""
        async with self._asked(request, stream=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_REPLY_BYTES:
                    raise EngineError(f"{response.url}: the answer is above {MAX_REPLY_BYTES} bytes")
        return _generation(bytes(body))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Sample one completion and hand it on piece by piece. Raises EngineError, WaitTimeout."""
        async with self._asked(request, stream=True) as response:
            async for line in response.content:
                event = line.strip().removeprefix(b"data: ")
                if event and event != b"[DONE]":
                    yield _generation(event)

    def peek(self, request_id: str) -> Generation | None:
        """None: a request under way is known to its server only."""
        return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _asked(self, request: GenerationRequest, *, stream: bool) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with status 200 from any server. Raises EngineError, WaitTimeout."""
        try:
            async with (
                self._room,
                asyncio.timeout(self._patience_s),
                self._answer(_body(request, stream=stream)) as response,
            ):
                yield response
        except TimeoutError:
            raise WaitTimeout(
                f"completion {request.request_id} of {', '.join(self._under_way) or 'the run'}",
                self._patience_s,
                "The servers may be busy with training: ask again later, or ask for less",
            ) from None
        except (aiohttp.ClientError, ValueError) as error:  # it broke off in the middle
            raise EngineError(
                f"the connection to a rollout server broke off ({type(error).__name__}: {error}). Has it left the run?"
            ) from error

    @asynccontextmanager
    async def _answer(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        while True:
            address = self._least_busy()
            self._under_way[address] += 1
            try:
                response = await self._post(address, body)
                if response is not None:
                    async with response:
                        yield response
                    return
            finally:
                if address in self._under_way:
                    self._under_way[address] -= 1
            await asyncio.sleep(PAUSE_S)

    def _least_busy(self) -> str:
        if not self._under_way:
            raise EngineError(
                f"no rollout server of the run answers any more ({self._lost}). Is the run still going on?"
            )
        return min(self._under_way, key=lambda address: self._under_way[address])

    async def _post(self, address: str, body: dict[str, Any]) -> aiohttp.ClientResponse | None:
        """The response, or None if the server is busy or cannot be reached. Raises EngineError for a refusal."""
        session = self._open_session()
        try:
            response = await session.post(
                f"{address}/v1/completions", json=body, headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            self._under_way.pop(address, None)
            self._lost = f"{address}: {type(error).__name__}"
            return None
        if response.status == 200:
            return response
        async with response:
            if response.status in BUSY:
                return None
            said = (await response.content.read(_SHOWN * 4)).decode("utf-8", "replace")
            raise EngineError(f"{address} refused with status {response.status}: {said[:_SHOWN]}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEP_ALIVE_S)
            cookies = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=cookies)
        return self._session


def _body(request: GenerationRequest, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [*request.prompt, *request.prefix],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    return body if request.seed is None else {**body, "seed": request.seed}


def _generation(body: bytes) -> Generation:
    """The completion of an answer. Raises EngineError if it cannot be read, or reports an error."""
    try:
        reply = msgspec.json.decode(body, type=_Reply)
        if reply.error is None:
            (choice,) = reply.choices
            logprobs = np.asarray(choice.logprobs["token_logprobs"], np.float32)
            tokens = np.asarray(choice.token_ids, np.int32)
            return Generation(tokens, logprobs, choice.policy_versions, choice.finish_reason or "")
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise EngineError(
            f"a rollout server's answer cannot be read ({type(error).__name__}: {error}). Is it of this release?"
        ) from error
    raise EngineError(f"a rollout server says: {str(reply.error.get('message', reply.error))[:_SHOWN]}")
