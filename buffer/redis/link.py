"""Calls to the server that survive a lost connection, a restart, a full memory and lost scripts.

    call   --repeated, with backoff, until timeout_s--> server        (every call made here is idempotent)
    until  --BLPOP on a connection of its own---------> wake list     (filled by the Lua scripts)

`call` waits for the server only. `until` waits for an element of a wake list; an element that is lost
together with its waiter delays the others by at most RECHECK_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import exceptions as server_errors
from redis.asyncio import Redis

from async_grpo.errors import BufferFault, ServerFull, ServerLost, ServerRefused, WaitTimeout
from buffer.redis.client import PASSWORD_VARIABLE, address
from buffer.redis.scripts import Script

T = TypeVar("T")

RECHECK_S = 5.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.02, 1.0
PAGE = 64
"""Payloads fetched by one command, so that no reply is huge."""

_REFUSED = (server_errors.AuthenticationError, server_errors.AuthorizationError, server_errors.NoPermissionError)
_LOST = (server_errors.ConnectionError, server_errors.TimeoutError, server_errors.ReadOnlyError, OSError)
"""Waiting may help: the server restarts, or another takes over."""
_FULL = (server_errors.OutOfMemoryError,)
"""Waiting may help: somebody drains the server."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """The answer of an attempt that is to be made again, after `for_s` at the latest."""

    for_s: float = RECHECK_S


@dataclass(frozen=True, slots=True)
class Payload:
    """A value to SET; `only_new` leaves one that exists as it is."""

    key: str
    value: bytes
    only_new: bool = False


class Link:
    """A client, and the policy for its failures."""

    def __init__(self, client: Redis, timeout_s: float) -> None:
        self.client: Any = client  # redis-py types replies as bytes | str; this client never decodes: bytes
        self._timeout_s = timeout_s

    async def call(self, do: Callable[[], Awaitable[Any]]) -> Any:
        """The result of an idempotent `do`, repeated until timeout_s.

        Raises ServerLost, ServerFull, ServerRefused, or BufferFault for any other error of the server.
        """
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._timeout_s, FIRST_BACKOFF_S
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await do()
            except (server_errors.RedisError, OSError) as error:
                cause = _cause(error)
                if not _may_pass(cause) or loop.time() + pause_s > deadline:
                    raise self._named(cause) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)

    async def run(self, script: Script, keys: Sequence[str], *args: object, payloads: Sequence[Payload] = ()) -> Any:
        """The reply of a script. The payloads are stored in the same transaction: both happen, or neither."""
        return await self.call(lambda: self._run(script, keys, args, payloads))

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values by key."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), PAGE):
            found += await self.call(lambda page=keys[start : start + PAGE]: self.client.mget(page))  # type: ignore[misc]
        return found

    async def until(
        self, wake: str, attempt: Callable[[], Awaitable[T | NotYet]], *, waited_for: str, timeout_s: float
    ) -> T:
        """The first answer of `attempt` other than NotYet; it is made again whenever the list `wake` has an
        element. Raises WaitTimeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while isinstance(answer := await attempt(), NotYet):
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            await self._sleep(wake, min(left_s, answer.for_s, RECHECK_S))
        return answer

    async def aclose(self) -> None:
        """Close all connections."""
        await self.client.aclose()

    async def _sleep(self, wake: str, for_s: float) -> None:
        """Until an element comes, or for_s. A connection that is lost meanwhile is met by the next attempt."""
        try:
            async with asyncio.timeout(for_s + self._timeout_s):
                await self.client.blpop([wake], timeout=max(for_s, 0.01))  # 0 would mean for ever
        except _LOST:
            await asyncio.sleep(FIRST_BACKOFF_S)

    async def _run(
        self, script: Script, keys: Sequence[str], args: Sequence[object], payloads: Sequence[Payload]
    ) -> Any:
        try:
            return await self._once(script, keys, args, payloads)
        except server_errors.NoScriptError:  # a new server, or one that was restarted
            await self.client.script_load(script.source)
            return await self._once(script, keys, args, payloads)

    async def _once(
        self, script: Script, keys: Sequence[str], args: Sequence[object], payloads: Sequence[Payload]
    ) -> Any:
        if not payloads:
            return await self.client.evalsha(script.digest, len(keys), *keys, *args)
        async with self.client.pipeline(transaction=True) as pipe:
            for payload in payloads:
                pipe.set(payload.key, payload.value, nx=payload.only_new)
            pipe.evalsha(script.digest, len(keys), *keys, *args)
            return (await pipe.execute())[-1]

    def _named(self, error: Exception) -> BufferFault:
        where, said = address(self.client), str(error).rstrip(". ") or type(error).__name__
        if isinstance(error, _REFUSED):
            return ServerRefused(
                f"the server at {where} refuses this client: {said}. Set {PASSWORD_VARIABLE}, or widen its ACL"
            )
        if isinstance(error, _FULL):
            return ServerFull(
                f"the server at {where} has been at its memory limit for {self._timeout_s:g} s: nothing more can be "
                "stored. Raise redis.max_memory_bytes (the server's maxmemory), or lower max_staleness"
            )
        if isinstance(error, _LOST):
            return ServerLost(
                f"the server at {where} has not answered for {self._timeout_s:g} s: {said}. "
                "Check that it runs and can be reached, or raise redis.timeout_s"
            )
        return BufferFault(f"the server at {where} failed: {said}")


def _cause(error: Exception) -> Exception:
    """What went wrong: redis-py reports a refusal at connection time as a lost connection, with its cause."""
    return error.__cause__ if isinstance(error.__cause__, _REFUSED) else error


def _may_pass(error: Exception) -> bool:
    return isinstance(error, (*_LOST, *_FULL)) and not isinstance(error, _REFUSED)
