"""Calls to the server that survive a lost connection, a restart, a failover, a full memory and lost scripts.

    call   --attempts, with backoff, until timeout_s--> server        (every call made here is idempotent)
    run    --script, then WAIT on the same connection--> server, and its replicas where they are waited for
    until  --BLPOP on a connection of its own---------> wake list     (filled by the Lua scripts)

`call` waits for the server, and on one connection no longer than an attempt may take. The next attempt uses a new
connection, because a connection may be silent while the server is well (a dropped NAT entry). `until` waits for an
element of a wake list. An element that is lost together with its waiter delays the others by at most RECHECK_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import exceptions as server_errors
from redis.asyncio import Redis

from async_grpo.errors import ReplicasBehind, WaitTimeout
from buffer.redis.client import RunClient
from buffer.redis.connection import Command, exchange, one_connection, transact
from buffer.redis.errors import LOST, cause_of, may_pass, named
from buffer.redis.scripts import Script, script

T = TypeVar("T")

RECHECK_S = 5.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.02, 1.0
LONGEST_FIRST_ATTEMPT_S, LEAST_ATTEMPT_S, FIRST_SHARE = 5.0, 1.0, 1 / 6
"""The first attempt may take FIRST_SHARE of timeout_s, within these bounds, and each further one twice as long as the
one before. The last attempt thus has about half of timeout_s, which suffices for a slow server."""
CLOSE_S = 0.5
"""Limit for closing idle connections, because a peer that is gone does not answer."""
LATE_WAKE_S = 5.0
"""Seconds that a BLPOP may overrun before its connection counts as lost."""
PAGE = 64
"""Payloads fetched by one command, which bounds the size of a reply."""
CALLS_AT_ONCE = 32
"""Connections of one client, without those that wait by BLPOP. Further calls queue."""
CONFIRM_MARGIN, LEAST_MARGIN_S = 0.1, 0.25
"""Share of timeout_s, at least LEAST_MARGIN_S, that is kept back while waiting for replicas. Otherwise their silence
would look like the server's."""
BARRIER = script("barrier")


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The result of an attempt that must be repeated, after at most `for_s` seconds."""

    for_s: float = RECHECK_S
    listens: bool = True
    """False if an element of the wake list would not be for this waiter."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A value to SET. `only_new` keeps an existing value."""

    key: str
    value: bytes
    only_new: bool = False


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A script with its arguments, and the payloads that are stored with it."""

    script: Script
    keys: Sequence[str]
    args: Command
    payloads: Sequence[Payload]
    together: bool

    @property
    def atomic(self) -> bool:
        """Whether it needs a transaction."""
        return self.together and len(self.payloads) > 0

    def commands(self) -> list[Command]:
        """The commands to send, payloads first."""
        sets: list[Command] = []
        for payload in self.payloads:
            store: Command = ("SET", payload.key, payload.value)
            sets.append((*store, "NX") if payload.only_new else store)
        return [*sets, ("EVALSHA", self.script.digest, len(self.keys), *self.keys, *self.args)]


class RetryingClient:
    """A client with its policy for failures."""

    def __init__(self, client: RunClient, timeout_s: float) -> None:
        self.client: Any = client  # redis-py types replies as bytes | str; this client never decodes: bytes
        self._timeout_s = timeout_s
        self._replicas = client.replicas_to_wait_for
        self._line = asyncio.Semaphore(CALLS_AT_ONCE)

    async def call(self, do: Callable[[], Awaitable[Any]]) -> Any:
        """The result of the idempotent `do`, which is repeated until it succeeds or timeout_s has passed.

        Raises ServerLost, ServerFull, ServerRefused, or BufferFault for any other error of the server.
        """
        return await self._persist(lambda _: do())

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        *args: bytes | str | float,
        payloads: Sequence[Payload] = (),
        together: bool = True,
    ) -> Any:
        """The reply of a script. The payloads are stored in the same transaction, so that both happen or neither.

        A restarted server stores the payloads and then asks for the script; nothing refers to them until the script has
        run. With `together` False they are stored just before the script, which is faster; the script checks that they
        are there. Raises as `call` does, and ReplicasBehind if the change was made but too few replicas confirmed it.
        """
        call = ScriptCall(script, keys, args, payloads, together)
        return await self._persist(lambda until: self._run(call, until))

    async def fetch(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of the keys, in their order; None for a key that does not exist."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), PAGE):
            found += await self.call(lambda page=keys[start : start + PAGE]: self.client.mget(page))  # type: ignore[misc]
        return found

    async def retry_until(
        self, wake: str, attempt: Callable[[], Awaitable[T | RetryLater]], *, waited_for: str, timeout_s: float
    ) -> T:
        """The first result of `attempt` other than RetryLater. It is repeated whenever the list `wake` has an element.
        Raises WaitTimeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while isinstance(answer := await attempt(), RetryLater):
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise WaitTimeout(waited_for, timeout_s)
            if answer.listens:
                await self._sleep(wake, min(left_s, answer.for_s, RECHECK_S))
            else:
                await asyncio.sleep(min(left_s, answer.for_s))
        return answer

    async def aclose(self) -> None:
        """Close all connections."""
        await close(self.client)

    async def _persist(self, attempt: Callable[[float], Awaitable[Any]]) -> Any:
        """Repeat `attempt`, which is given the loop time at which it will be cancelled."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        patience_s = min(LONGEST_FIRST_ATTEMPT_S, max(LEAST_ATTEMPT_S, FIRST_SHARE * self._timeout_s))
        pause_s, cause, before = FIRST_BACKOFF_S, None, sys.exc_info()[1]
        while True:
            try:
                async with asyncio.timeout_at(deadline) as clock, self._line:
                    until = loop.time() + patience_s
                    async with asyncio.timeout_at(until if until < deadline else None):
                        return await attempt(min(until, deadline))
            except (server_errors.RedisError, OSError, ReplicasBehind) as error:
                # An attempt that timed out says less about the cause than the one before it.
                cause = cause if cause and clock.expired() else cause_of(error, before)
                if not may_pass(cause) or loop.time() + pause_s > deadline:
                    raise named(cause, self.client.endpoint, self._timeout_s) from error
            await self._look_elsewhere(cause)
            await asyncio.sleep(pause_s)
            pause_s, patience_s = min(2 * pause_s, LONGEST_BACKOFF_S), 2 * patience_s

    async def _look_elsewhere(self, cause: Exception) -> None:
        """Let the next attempt look for the node again, if the run may have moved, and use new connections: if one was
        lost or silent, idle ones may be too."""
        if self.client.discovery is not None:
            self.client.discovery.forget()
        if self.client.discovery is not None or isinstance(cause, LOST):
            with contextlib.suppress(server_errors.RedisError, OSError):
                async with asyncio.timeout(CLOSE_S):
                    await self.client.connection_pool.disconnect(inuse_connections=False)

    async def _sleep(self, wake: str, for_s: float) -> None:
        """Wait at most `for_s` for an element of the list. The next attempt notices if the connection was lost."""
        before = sys.exc_info()[1]
        try:
            async with asyncio.timeout(for_s + min(self._timeout_s, LATE_WAKE_S)):
                async with one_connection(self.client) as connection:
                    await exchange(connection, ("BLPOP", wake, max(for_s, 0.01)))  # 0 would mean for ever
        except (server_errors.RedisError, OSError) as error:
            cause = cause_of(error, before)
            if not may_pass(cause):
                raise named(cause, self.client.endpoint, self._timeout_s) from error
            await asyncio.sleep(FIRST_BACKOFF_S)

    async def _run(self, call: ScriptCall, until: float) -> Any:
        try:
            return await self._once(call, until)
        except server_errors.NoScriptError:  # a new server, or one that was restarted
            for each in (call.script, BARRIER) if self._replicas else (call.script,):
                await self.client.script_load(each.source)
            return await self._once(call, until)

    async def _once(self, call: ScriptCall, until: float) -> Any:
        commands = call.commands()
        async with one_connection(self.client) as connection:
            send = transact(connection, commands) if call.atomic else exchange(connection, *commands)
            *_, reply = await send
            if self._replicas and not call.script.only_reads:
                await self._confirm(connection, until)
            return reply

    async def _confirm(self, connection: Any, until: float) -> None:
        """Wait until enough replicas have everything that the server had when it answered. Raises ReplicasBehind."""
        margin_s = max(CONFIRM_MARGIN * self._timeout_s, LEAST_MARGIN_S)
        left_s = until - asyncio.get_running_loop().time() - margin_s
        barrier = ("EVALSHA", BARRIER.digest, 1, self.client.barrier_key)
        _, have = await exchange(connection, barrier, ("WAIT", self._replicas, max(1, int(1000 * left_s))))
        if have < self._replicas:
            raise ReplicasBehind(
                f"{have} of {self._replicas} replicas of the server at {self.client.endpoint} have confirmed a "
                f"change within {self._timeout_s:g} s. It has happened on the primary, and repeating the call is "
                "harmless, but a failover now could undo it. Bring the replicas back, or lower "
                "redis.replicas_to_wait_for"
            )


async def close(client: Redis) -> None:
    """Close all connections, also those to a server that is gone."""
    with contextlib.suppress(server_errors.RedisError, OSError):
        await client.aclose()
